/* model/shape.h - the dimensions of a model and the kinds of its layers (layers.inc), and how a
 * cache of pages holds their keys and values.
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

/* The dimensions of a model, as numbers that arrive by name. */
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
    float expert_limit;      /* of experts' gate and up (swiglu_share); 0: none */
    const LayerKinds *layer; /* host array of L */
} Shape;

/* One row of layers.inc for one model. */
typedef struct KindInfo {
    const char *name;
    Part part;
    int has;
    size_t token, sequence; /* elements a token keeps in the pages, bytes a sequence keeps */
    int window;             /* for how many tokens the former are kept; 0: for all */
} KindInfo;

/* Numbers of a row of attention's qkv: q, k and v side by side, or k and v where q has a gate. */
int qkv_width(const Shape *shape);
/* From one row of a gated delta network's products to the next: q, k, v, z, b and a side by side,
 * and so many numbers more that rows begin at multiples of ROW_PIECE. */
enum { ROW_PIECE = 8 };
int delta_width(const Shape *shape);
/* Channels of a gated delta network's convolution: of q, of k, of v. */
int delta_channels(const Shape *shape);
/* Bytes that a sequence keeps of such a layer. */
size_t delta_bytes(const Shape *shape);

KindInfo kind_info(const Shape *shape, LayerKind kind);
Status kind_find(Part part, const char *name, LayerKind *kind);
/* Those of `what` that the layer's kinds have. */
int layer_has(const Shape *shape, int layer, int what);
/* As the tables say it: `s` is the Shape, `l` the layer. */
#define HAS(what) layer_has(s, l, what)
/* The same of both of its kinds together. */
size_t layer_token(const Shape *shape, int layer);
size_t layer_sequence(const Shape *shape, int layer);

/* The layers that keep keys and values, dealt to lists of at most `layers` each: `full` lists of
 * those that read all tokens before a row, then `windowed` lists of those that read a window. A
 * page of a sequence has a frame for each list, the memory for its tokens in the list's layers.
 * Those of the windowed lists are given back when no later row reads them. */
enum { LISTS_MOST = 8 };
typedef struct Lists {
    int full, windowed, layers;
    size_t token; /* elements of a token in one layer */
    int window;   /* of the windowed lists */
} Lists;

/* Where a layer's keys and values are: its list, and its number there. */
typedef struct Region {
    int list, at;
} Region;

/* The lists of a model, and the region of each layer (L). A window that the context does not fill
 * is none. Where layers keep states too, all lists are full: a state needs all pages before it. */
Lists lists_of(const Shape *shape, Region *region);

/* Whether any layer has experts. */
int has_experts(const Shape *shape);

#endif
