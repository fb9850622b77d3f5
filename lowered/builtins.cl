// SPDX-License-Identifier: Apache-2.0
// What Intel's GPU compiler knows and its CPU compiler does not, lane by lane.
// Names and types are those of the OpenCL extensions that triton-xpu calls:
// cl_intel_subgroup_matrix_multiply_accumulate and cl_intel_subgroup_2d_block_io.
// None is inlined: with each product unrolled in place, prefill took over ten minutes to
// compile, and now takes three.

float __attribute__((overloadable)) of_bf16(ushort code) {
    return as_float((uint)code << 16);
}

// One dpas: acc[m] += sum over k of A[m][k] * B[k][lane]. A[m][k] is a[m] of lane k;
// rows 2j and 2j + 1 of B are the low and the high half of b[j].
float8 __attribute__((overloadable, noinline)) intel_sub_group_bf16_bf16_matrix_mad_k16(
    short8 a, int8 b, float8 acc) {
    short rows[8];
    int columns[8];
    float sums[8];
    vstore8(a, 0, rows);
    vstore8(b, 0, columns);
    vstore8(acc, 0, sums);
    for (int k = 0; k < 16; ++k) {
        uint pair = (uint)columns[k / 2];
        float value = of_bf16((ushort)(k % 2 ? pair >> 16 : pair & 0xffff));
        for (int m = 0; m < 8; ++m) {
            sums[m] += of_bf16((ushort)sub_group_shuffle(rows[m], (uint)k)) * value;
        }
    }
    return vload8(0, sums);
}

// Two blocks of 8 rows and 16 columns of 16 bits each, side by side. `width` and
// `pitch` are bytes, `place` is (column, row) in elements; what is outside reads 0.
void __attribute__((overloadable, noinline)) intel_sub_group_2d_block_read_16b_8r16x2c(
    __global void *base, int width, int height, int pitch, int2 place,
    __private ushort *result) {
    for (int block = 0; block < 2; ++block) {
        int column = place.x + 16 * block + (int)get_sub_group_local_id();
        for (int r = 0; r < 8; ++r) {
            int row = place.y + r;
            int inside = row >= 0 && row < height && column >= 0 && 2 * column < width;
            __global ushort *line = (__global ushort *)((__global uchar *)base + (long)row * pitch);
            result[8 * block + r] = inside ? line[column] : 0;
        }
    }
}
