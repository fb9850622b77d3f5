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

// The value of 16 bits at (column, row) of a matrix, and of 32. `width` and `pitch` are
// bytes; what is outside reads 0.
ushort short_at(__global void *base, int width, int height, int pitch, int column, int row) {
    int inside = row >= 0 && row < height && column >= 0 && 2 * column < width;
    __global ushort *line = (__global ushort *)((__global uchar *)base + (long)row * pitch);
    return inside ? line[column] : 0;
}

uint int_at(__global void *base, int width, int height, int pitch, int column, int row) {
    int inside = row >= 0 && row < height && column >= 0 && 4 * column < width;
    __global uint *line = (__global uint *)((__global uchar *)base + (long)row * pitch);
    return inside ? line[column] : 0;
}

// Two blocks of 8 or 16 rows and 16 columns of 16 bits each, side by side. `place` is
// (column, row) in elements.
void two_blocks(
    __global void *base, int width, int height, int pitch, int2 place, int rows,
    __private ushort *result) {
    for (int block = 0; block < 2; ++block) {
        int column = place.x + 16 * block + (int)get_sub_group_local_id();
        for (int r = 0; r < rows; ++r) {
            result[rows * block + r] = short_at(base, width, height, pitch, column, place.y + r);
        }
    }
}

void __attribute__((overloadable, noinline)) intel_sub_group_2d_block_read_16b_8r16x2c(
    __global void *base, int width, int height, int pitch, int2 place,
    __private ushort *result) {
    two_blocks(base, width, height, pitch, place, 8, result);
}

void __attribute__((overloadable, noinline)) intel_sub_group_2d_block_read_16b_16r16x2c(
    __global void *base, int width, int height, int pitch, int2 place,
    __private ushort *result) {
    two_blocks(base, width, height, pitch, place, 16, result);
}

// 32 rows of 16 columns of 16 bits: a lane gets its column, two rows in each value.
void __attribute__((overloadable, noinline)) intel_sub_group_2d_block_read_transform_16b_32r16x1c(
    __global void *base, int width, int height, int pitch, int2 place,
    __private uint *result) {
    int column = place.x + (int)get_sub_group_local_id();
    for (int pair = 0; pair < 16; ++pair) {
        int row = place.y + 2 * pair;
        uint low = short_at(base, width, height, pitch, column, row);
        uint high = short_at(base, width, height, pitch, column, row + 1);
        result[pair] = low | high << 16;
    }
}

// 16 rows of 8 columns of 32 bits, transposed: a lane gets its row.
void __attribute__((overloadable, noinline)) intel_sub_group_2d_block_read_transpose_32b_16r8x1c(
    __global void *base, int width, int height, int pitch, int2 place,
    __private uint *result) {
    int row = place.y + (int)get_sub_group_local_id();
    for (int c = 0; c < 8; ++c) {
        result[c] = int_at(base, width, height, pitch, place.x + c, row);
    }
}
