/* model/gradient_parts.h - the parts of a call's gradient, and their sum as a binary tree. */
#ifndef TINSMITH_MODEL_GRADIENT_PARTS_H
#define TINSMITH_MODEL_GRADIENT_PARTS_H

#include "adapter.h"

/* The part of the rows [row, row + rows) among a call's `total`: that of their middle. */
int rows_part(int64_t row, int64_t rows, int64_t total);
/* Sets the sum of a node, 1 to PART_NODES - 1, which becomes the adapter's; a vector of another
 * owner must be of vector_take(). Siblings that are both known are summed at once. */
Status parts_put(Adapter *adapter, int node, PartSum sum);
/* A node's sum, which is the caller's then. Fails if it is not known: it was not put, or its
 * sibling was. */
Status parts_take(Adapter *adapter, int node, PartSum *sum);
/* Whether any node is known. */
int parts_wait(const Adapter *adapter);
void parts_drop(Adapter *adapter);

#endif
