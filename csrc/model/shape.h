/* model/shape.h - the dimensions of a model and the kinds of its layers (layers.inc), and how the
 * page cache holds their keys and values.
 *
 * Letters, here and everywhere: T tokens (rows), D width, H heads, G key-value heads, E head width,
 * F ffn width, V vocabulary, K targets of a token, R rank, L layers, S sequences. */
#ifndef TINSMITH_MODEL_SHAPE_H
#define TINSMITH_MODEL_SHAPE_H

#include "../device/device.h"

/* A layer is x += mixer(norm(x)), then x += feed(norm(x)). */
typedef enum Part { MIXER, FEED, PARTS } Part;

/* Flags of the kinds of layers. They select the rows of weights.inc and acts.inc. */
enum { ATTENTION = 1, DENSE = 2, DELTA = 4, EXPERTS = 8, SHARED = 16, ANY = ~0 };

/* Kinds in the order of layers.inc. */
typedef enum LayerKind {
#define LAYER_KIND(kind, part, has, token, window, sequence) KIND_##kind,
#include "layers.inc"
    KINDS
} LayerKind;

typedef struct LayerKinds {
    LayerKind kind[PARTS];
} LayerKinds;

enum { AXES_MOST = 3 };

/* The dimensions of a model, passed by name. */
#define SHAPE_LIST(X) \
    X(layers)         \
    X(width)          \
    X(heads)          \
    X(kv_heads)       \
    X(head_width)     \
    X(rotary)         \
    X(ffn)            \
    X(vocab)          \
    X(context)        \
    X(window)         \
    X(qkv_bias)       \
    X(qk_norm)        \
    X(q_gate)         \
    X(tied)           \
    X(key_heads)      \
    X(value_heads)    \
    X(key_width)      \
    X(value_width)    \
    X(experts)        \
    X(chosen)         \
    X(expert_ffn)     \
    X(norm_shares)    \
    X(expert_bias)    \
    X(o_bias)         \
    X(sinks)

typedef struct Shape {
#define X(name) int name;
    SHAPE_LIST(X)
#undef X
    float norm_eps;
    float rope_scale;        /* factor of rope's cosine and sine */
    float expert_limit;      /* clamps experts' gate and up (swiglu_share); 0: none */
    int axes;                /* of a position: 1, or 3 with M-RoPE (vision/images.h) */
    const int32_t *axis;     /* host array of rotary/2: which of 3 axes turns each pair */
    const LayerKinds *layer; /* host array of L */
} Shape;

/* One row of layers.inc for one model. */
typedef struct KindInfo {
    const char *name;
    Part part;
    int has;
    size_t token, sequence; /* elements per token in the pages, bytes of state per sequence */
    int window;             /* tokens whose keys and values are kept; 0: all */
} KindInfo;

/* Numbers of a row of attention's qkv: q, k and v side by side, or k and v if q has a gate. */
int qkv_width(const Shape *shape);
/* The row stride of a gated delta network's products: q, k, v, z, b and a side by side, padded to a
 * multiple of ROW_PIECE. */
enum { ROW_PIECE = 8 };
int delta_width(const Shape *shape);
/* Channels of a gated delta network's convolution: of q, of k, of v. */
int delta_channels(const Shape *shape);
/* Bytes of a sequence's state in such a layer. */
size_t delta_bytes(const Shape *shape);

KindInfo kind_info(const Shape *shape, LayerKind kind);
Status kind_find(Part part, const char *name, LayerKind *kind);
/* The flags of `what` that the layer's kinds have. */
int layer_has(const Shape *shape, int layer, int what);
/* For the tables: `s` is the Shape, `l` the layer. */
#define HAS(what) layer_has(s, l, what)
/* KindInfo's token and sequence, summed over both kinds of the layer. */
size_t layer_token(const Shape *shape, int layer);
size_t layer_sequence(const Shape *shape, int layer);

/* The layers with keys and values, split into lists of at most `layers` each: first `full` lists,
 * whose layers read all tokens before a row, then `windowed` lists, whose layers read a window. A
 * page of a sequence has one frame per list: the memory for its tokens in the list's layers. Frames
 * of windowed lists are freed when no later row reads them. */
enum { LISTS_MOST = 8 };
typedef struct Lists {
    int full, windowed, layers;
    size_t token; /* elements of a token in one layer */
    int window;   /* of the windowed lists */
} Lists;

/* The place of a layer's keys and values: its list, and its index there. */
typedef struct Region {
    int list, at;
} Region;

/* The lists of a model, and the region of each layer (L). A window as long as the context counts as
 * none. If layers also have states, all lists are full: a state needs all pages before it. */
Lists lists_of(const Shape *shape, Region *region);
/* Numbers the layers [first, end) in their lists again, from 0 on: a stage has them for itself.
 * Returns the most in one list. */
int lists_cut(const Shape *shape, Region *region, int first, int end);

/* Refuses what no kernel computes; an error names the dimension. */
Status shape_check(const Shape *shape);
/* Whether any layer has experts. */
int has_experts(const Shape *shape);

#endif
