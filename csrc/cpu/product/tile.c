/* cpu/product/tile.c - adds to the sums of a register tile: one loop for all tiles, because inlined
 * the compiler would make four loops per tile. */
#include "tile.h"

void CPU(sums_add)(Out out, const float *sums, int rows, int width)
{
    for (int r = 0; r < rows; r++, out = out_at(out, 1, 0), sums += width)
        for (int x = 0; x < width; x += VL) {
            vf y = v_load(sums + x);
            if (out.bias) y += v_load(out.bias + x);
            if (out.add) y += v_load(out.add + x);
            v_store(out.c + x, y);
        }
}
