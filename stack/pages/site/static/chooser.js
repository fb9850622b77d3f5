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
  refused: "why not",
};

function tag(name, text, ...children) {
  const made = document.createElement(name);
  made.textContent = text;
  made.append(...children);
  return made;
}

function plansOf(table) {
  const [heads, ...rows] = [...table.rows].map((row) =>
    [...row.cells].map((cell) => cell.textContent.trim()),
  );
  return rows.map((row) => Object.fromEntries(heads.map((head, at) => [head, row[at]])));
}

// As lab/planner/choices.py writes it; tests/site compares them.
function serveCommand(plan) {
  const [, ranks, stages] = plan.split.match(/^TP (\d+)(?:, PP (\d+))?$/);
  const later = plan.model.startsWith("V4.1");
  const parser = later ? "deepseek_v41" : "deepseek_v4";
  return [
    `VLLM_WORKER_MULTIPROC_METHOD=spawn vllm serve /path/to/DeepSeek-${plan.model}`,
    `--tensor-parallel-size ${ranks}`,
    ...(stages ? [`--pipeline-parallel-size ${stages}`] : []),
    "--kv-cache-dtype fp8",
    `--block-size ${later ? 128 : 256}`,
    `--max-model-len ${plan.context}`,
    `--max-num-batched-tokens ${plan.chunk}`,
    "--gpu-memory-utilization 0.9",
    ...(later ? [`--limit-mm-per-prompt '{"image": 0}'`] : []),
    `--reasoning-parser ${parser}`,
    `--tool-call-parser ${parser}`,
    "--enable-auto-tool-choice",
  ].join(" \\\n    ");
}

function planCommand(plan) {
  const model = { "V4-Flash": "flash", "V4-Pro": "pro", "V4.1-Flash": "v4.1" }[plan.model];
  const [, device] = plan.device.match(/^(?:Arc Pro )?([^,]+)/);
  return (
    `xpustack plan ${plan.release} --model ${model}` +
    ` --device ${device.toLowerCase().replace(" ", "")} --count ${plan.count}` +
    ` --context ${plan.context} --concurrency ${plan.concurrency}`
  );
}

function answer(plans) {
  const [first] = plans;
  const serves = plans.filter((plan) => !plan.refused);
  const load =
    `${first.concurrency} requests of ${Number(first.context).toLocaleString("en")} tokens`;
  const speed = (plan) =>
    plan.refused ? "" : `${plan.tokens_per_second_slow} to ${plan.tokens_per_second_fast}`;
  const heads = Object.entries(SHOWN).filter(
    ([name]) => name !== "refused" || serves.length < plans.length,
  );
  const table = tag("table", "");
  table.createTHead().append(tag("tr", "", ...heads.map(([, head]) => tag("th", head))));
  const body = table.createTBody();
  for (const plan of plans) {
    const row = { ...plan, speed: speed(plan) };
    body.append(tag("tr", "", ...heads.map(([name]) => tag("td", row[name]))));
  }
  const box = tag("div", "", table);
  box.className = "table-wrapper";
  const command = tag("pre", serves.length ? serveCommand(serves[0]) : "");
  const says = serves.length
    ? `${serves[0].split} for ${load}: ${serves[0].weights_gib} GiB of weights on a device,` +
      ` room for ${serves[0].requests} requests, ${speed(serves[0])} tokens per second by a model.`
    : `No split of these devices starts with ${load}: take more devices.`;
  return [
    tag("p", says),
    ...(serves.length ? [command] : []),
    box,
    tag("p", "Another load, or an image: "),
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
      select.replaceChildren(...offered.map((value) => tag("option", value)));
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
