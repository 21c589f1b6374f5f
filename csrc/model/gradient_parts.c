/* model/gradient_parts.c - the parts of a call's gradient, and their sum as a binary tree.
 *
 * A call's micro-batches form eight parts, by rows. Within a part gradients are summed in order;
 * the parts' sums are ((0+1)+(2+3))+((4+5)+(6+7)). A part depends on the call's datums and
 * step_tokens alone. So any process may compute any part, in any order, or twice, and the sum has
 * the same bits. Parts without rows count for nothing. The tree is an array: 1 is the root, 2·n and
 * 2·n + 1 are the children of n, and GRADIENT_PARTS + p is the leaf of part p. A sum of two float64
 * losses follows the same tree. */
#include "gradient_parts.h"

int rows_part(int64_t row, int64_t rows, int64_t total)
{
    return (int)(GRADIENT_PARTS * (2 * row + rows) / (2 * total));
}

/* left += right; right's vector is given back. */
static void sum_add(Adapter *adapter, PartSum *left, PartSum *right)
{
    left->loss += right->loss;
    left->tokens += right->tokens;
    left->sequences += right->sequences;
    if (!flat_exists(&left->vector)) {
        left->vector = right->vector;
        return;
    }
    if (!flat_exists(&right->vector)) return;
    vector_add(adapter->model, &adapter->bytes, &left->vector, &right->vector);
    vector_give(adapter->model, &adapter->bytes, &right->vector);
}

/* Whether the node, one above it, or one below it is known already. */
static int overlaps(const PartSum *sum, int node)
{
    for (int above = node; above; above /= 2)
        if (sum[above].known) return 1;
    for (int first = 2 * node, count = 2; first < PART_NODES; first *= 2, count *= 2)
        for (int i = 0; i < count; i++)
            if (sum[first + i].known) return 1;
    return 0;
}

Status parts_put(Adapter *adapter, int node, PartSum given)
{
    PartSum *sum = adapter->sum;
    if (node < 1 || node >= PART_NODES)
        return fail(STATUS_INVALID, "a part's node is 1 to %d, not %d", PART_NODES - 1, node);
    if (overlaps(sum, node))
        return fail(STATUS_INVALID, "node %d, or a part of it, was summed before", node);
    given.known = 1;
    sum[node] = given;
    for (; node > 1 && sum[node ^ 1].known; node /= 2) {
        sum[node / 2] = sum[node & ~1];
        sum_add(adapter, &sum[node / 2], &sum[node | 1]);
        sum[node] = sum[node ^ 1] = (PartSum){0};
    }
    return STATUS_OK;
}

Status parts_take(Adapter *adapter, int node, PartSum *taken)
{
    if (node < 1 || node >= PART_NODES || !adapter->sum[node].known)
        return fail(STATUS_INVALID, "the sum of node %d is not known", node);
    *taken = adapter->sum[node];
    adapter->sum[node] = (PartSum){0};
    return STATUS_OK;
}

int parts_wait(const Adapter *adapter)
{
    int known = 0;
    for (int i = 1; i < PART_NODES; i++) known |= adapter->sum[i].known;
    return known;
}

void parts_drop(Adapter *adapter)
{
    for (int i = 1; i < PART_NODES; i++) {
        vector_give(adapter->model, &adapter->bytes, &adapter->sum[i].vector);
        adapter->sum[i] = (PartSum){0};
    }
}
