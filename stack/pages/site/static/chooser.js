// The chooser above the table of plans: of one machine and load, its splits and a command.
"use strict";

const ASKED = {
  device: "Device",
  count: "How many",
  model: "Model",
  context: "Tokens of a request",
  release: "vLLM release",
};
const SHOWN = {
  split: "split",
  weights_gib: "weights, GiB of a device",
  requests: "requests that fit",
  speed: "tokens per second, modelled",
};

function tag(name, text, ...children) {
  const made = document.createElement(name);
  made.textContent = text;
  made.append(...children);
  return made;
}

// A number of tokens with its thousands.
function option(value) {
  const made = tag("option", /^\d{4,}$/.test(value) ? thousands(value) : value);
  made.value = value;
  return made;
}

function thousands(text) {
  return Number(text).toLocaleString("en");
}

function plansOf(table) {
  const [heads, ...rows] = [...table.rows].map((row) =>
    [...row.cells].map((cell) => cell.textContent.trim()),
  );
  return rows.map((row) => Object.fromEntries(heads.map((head, at) => [head, row[at]])));
}

// As lab/planner/page.py plans it; tests/site compares them.
function planCommand(plan) {
  const model = { "V4-Flash": "flash", "V4-Pro": "pro", "V4.1-Flash": "v4.1" }[plan.model];
  const [, device] = plan.device.match(/^(?:Arc Pro )?([^,]+)/);
  return (
    `xpustack plan ${plan.release} --model ${model}` +
    ` --device ${device.toLowerCase().replace(" ", "")} --count ${plan.count}` +
    ` --context ${plan.context} --concurrency ${plan.concurrency}` +
    (plan.host_memory ? ` --host-memory ${plan.host_memory} --link ${plan.link}` : "")
  );
}

function answer(plans) {
  const [first] = plans;
  const serves = plans.filter((plan) => !plan.refused);
  const load =
    `${first.concurrency} requests of ${thousands(first.context)} tokens` +
    (first.host_memory ? `, experts in at most ${first.host_memory} GiB of the host` : "");
  const speed = (plan) =>
    `${plan.tokens_per_second_slow} to ${plan.tokens_per_second_fast}`;
  const table = tag("table", "");
  const heads = Object.values(SHOWN).map((head) => tag("th", head));
  table.createTHead().append(tag("tr", "", ...heads));
  const body = table.createTBody();
  for (const plan of plans) {
    const row = { ...plan, speed: speed(plan) };
    const cells = Object.keys(SHOWN).map((name) => tag("td", row[name]));
    const why = tag("td", plan.refused);
    why.colSpan = cells.length - 1;
    body.append(tag("tr", "", ...(plan.refused ? [cells[0], why] : cells)));
  }
  const box = tag("div", "", table);
  box.className = "table-wrapper";
  const command = tag("pre", first.serve.replaceAll(" --", " \\\n    --"));
  const says = serves.length
    ? `${serves[0].split} for ${load}: ${serves[0].weights_gib} GiB of weights on a device,` +
      ` room for ${serves[0].requests} requests, ${speed(serves[0])} tokens per second by a model.`
    : `No split of these devices starts with ${load}: take more devices.`;
  return [
    tag("p", says),
    ...(serves.length ? [command] : []),
    box,
    tag("p", "The same as a container, or another load: "),
    tag("pre", planCommand(first)),
  ];
}

function choose(place, plans) {
  const form = tag("form", "");
  const result = tag("div", "");
  const fields = Object.entries(ASKED).map(([name, text]) => {
    const select = tag("select", "");
    select.name = name;
    form.append(tag("label", `${text} `, select));
    return select;
  });
  // Each offers what plans with the choices before it have.
  const refresh = () => {
    let left = plans;
    for (const select of fields) {
      const before = select.value;
      const offered = [...new Set(left.map((plan) => plan[select.name]))];
      select.replaceChildren(...offered.map(option));
      if (offered.includes(before)) select.value = before;
      left = left.filter((plan) => plan[select.name] === select.value);
    }
    result.replaceChildren(...answer(left));
  };
  form.addEventListener("change", refresh);
  place.append(form, result);
  refresh();
}

document.addEventListener("DOMContentLoaded", () => {
  const place = document.getElementById("chooser");
  if (place) choose(place, plansOf(document.querySelector("article table")));
});
