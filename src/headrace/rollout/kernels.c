/* Kernels for decoding with small models: attention over a paged key/value cache, and the elementwise steps between matrix
 * products. One thread; float32 arithmetic whatever the storage. The file includes itself once per storage type.
 *
 * Keys lie transposed, [page][key/value head][size][PAGE], so that one vector holds one coordinate of neighbouring keys;
 * values lie as rows, [page][key/value head][PAGE][size]. Query rows that share a key/value head are taken ROWS at a time;
 * each tile walks over the pages it may see with an online softmax (Milakov and Gimelshein 2018). A row's arithmetic does
 * not depend on what else is in the batch.
 */
#ifndef STORE

#include <math.h>
#include <stdint.h>
#include <string.h>

#define PAGE 64
#define LANES 16
#define ROWS 6
#define LONGEST 512 /* largest head size */
#define HIDDEN (-1e30f)

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef float vec_8 __attribute__((vector_size(32)));
typedef int32_t ivec_8 __attribute__((vector_size(32)));
typedef float vec_4 __attribute__((vector_size(16)));
typedef int32_t ivec_4 __attribute__((vector_size(16)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef uint16_t half_vec __attribute__((vector_size(2 * LANES), aligned(2)));

#define INLINE static inline __attribute__((always_inline))

INLINE vec larger(vec a, vec b) {
    ivec first = a > b;
    return (vec)((first & (ivec)a) | (~first & (ivec)b));
}

/* keep a vector that several rows use in a register: without this gcc reads it again for each of them */
#ifdef __AVX512F__
#define IN_REGISTER(x) __asm__("" : "+v"(x))
#else
#define IN_REGISTER(x) ((void)0)
#endif

/* e^x for x <= 0: 2^n * e^r, |r| <= ln 2 / 2, polynomial of degree 6; below -87 it stays at e^-87, as good as 0 */
INLINE vec exp_vec(vec x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    x = larger(x, (vec){0} - 87.0f);
    vec n = (x * 1.44269504f + magic) - magic;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = r * 1.3888889e-3f + 8.3333333e-3f;
    p = p * r + 4.1666667e-2f;
    p = p * r + 1.6666667e-1f;
    p = p * r + 0.5f;
    p = p * (r * r) + r + 1.0f;
    ivec power = (__builtin_convertvector(n, ivec) + 127) << 23;
    return p * (vec)power;
}

INLINE float largest(const vec *scores) {
    vec top = scores[0];
    for (int c = 1; c < PAGE / LANES; c++) top = larger(top, scores[c]);
    vec_8 half[2];
    memcpy(half, &top, sizeof top);
    ivec_8 first = half[0] > half[1];
    vec_8 eight = (vec_8)((first & (ivec_8)half[0]) | (~first & (ivec_8)half[1]));
    vec_4 quarter[2];
    memcpy(quarter, &eight, sizeof eight);
    ivec_4 second = quarter[0] > quarter[1];
    vec_4 four = (vec_4)((second & (ivec_4)quarter[0]) | (~second & (ivec_4)quarter[1]));
    float left = four[0] > four[1] ? four[0] : four[1], right = four[2] > four[3] ? four[2] : four[3];
    return left > right ? left : right;
}

INLINE float total(vec sum) {
    float result = 0;
    for (int i = 0; i < LANES; i++) result += sum[i];
    return result;
}

/* the first `lanes` lanes of a vector, the others 0 */
#define LOAD(from, lanes) TYPED(load_some)(from, (lanes) < LANES ? (int)(lanes) : LANES)
#define SAVE(to, lanes, x) TYPED(store_some)(to, (lanes) < LANES ? (int)(lanes) : LANES, x)

/* a page lies anywhere in memory: fetch the next one while this one is computed with */
INLINE void prefetch(const void *from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch((const char *)from + at);
}

INLINE float load_f32(const float *x) { return *x; }
INLINE vec load_vec_f32(const float *x) { return *(const vec *)x; }
INLINE void store_f32(float *to, float x) { *to = x; }

INLINE float load_bf16(const uint16_t *x) {
    uint32_t bits = (uint32_t)*x << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}
INLINE vec load_vec_bf16(const uint16_t *x) {
    return (vec)(__builtin_convertvector(*(const half_vec *)x, uvec) << 16);
}
INLINE void store_bf16(uint16_t *to, float x) { /* to nearest, ties to even; NaN stays NaN */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    *to = x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE void store_vec_f32(float *to, vec x) { *(vec *)to = x; }
INLINE void store_vec_bf16(uint16_t *to, vec x) {
    uvec bits = (uvec)x, nan = (uvec)(x != x);
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    *(half_vec *)to = __builtin_convertvector((nan & 0x7fc0) | (~nan & bits), half_vec);
}

typedef struct {
    int64_t sequences, heads, shared, size, value_size, window, pages_per_slot;
    int64_t query_row, query_head, key_row, key_head, value_row, value_head;          /* strides in elements */
    float scale;
} Shape;

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define TYPED(name) JOIN(name, SUFFIX)

#define STORE float
#define SUFFIX f32
#include __FILE__
#undef STORE
#undef SUFFIX
#define STORE uint16_t
#define SUFFIX bf16
#include __FILE__

#else

INLINE vec TYPED(load_some)(const STORE *from, int lanes) {
    if (lanes == LANES) return TYPED(load_vec)(from);
    STORE padded[LANES] = {0};
    memcpy(padded, from, sizeof(STORE) * lanes);
    return TYPED(load_vec)(padded);
}

INLINE void TYPED(store_some)(STORE *to, int lanes, vec x) {
    if (lanes == LANES) {
        TYPED(store_vec)(to, x);
        return;
    }
    STORE padded[LANES];
    TYPED(store_vec)(padded, x);
    memcpy(to, padded, sizeof(STORE) * lanes);
}

/* x += delta (where there is one); out = x / sqrt(mean(x^2) + eps) * weight, row by row. out may be x. */
void TYPED(headrace_norm)(int64_t rows, int64_t row_stride, int64_t size, STORE *x, const STORE *delta, const STORE *weight, float eps,
                          STORE *out) {
    for (int64_t i = 0; i < rows; i++, x += row_stride, out += row_stride) {
        vec squares = {0};
        for (int64_t d = 0; d < size; d += LANES) {
            vec value = LOAD(x + d, size - d);
            if (delta) {
                value += LOAD(delta + i * row_stride + d, size - d);
                SAVE(x + d, size - d, value);
            }
            squares += value * value;
        }
        float scale = 1 / sqrtf(total(squares) / size + eps);
        for (int64_t d = 0; d < size; d += LANES) SAVE(out + d, size - d, LOAD(x + d, size - d) * scale * LOAD(weight + d, size - d));
    }
}

/* Rotary embedding in place on the first `heads` heads of each row: (a, b) -> (a cos - b sin, b cos + a sin), a and b the
 * halves of a head; cos and sin are [rows][size / 2]. */
void TYPED(headrace_rotate)(int64_t rows, int64_t row_stride, int64_t heads, int64_t size, STORE *x, const float *cosine, const float *sine) {
    int64_t half = size / 2;
    for (int64_t i = 0; i < rows; i++, x += row_stride, cosine += half, sine += half)
        for (int64_t h = 0; h < heads; h++) {
            STORE *a = x + h * size, *b = a + half;
            for (int64_t d = 0; d < half; d += LANES) {
                int lanes = half - d < LANES ? (int)(half - d) : LANES;
                vec c = load_some_f32(cosine + d, lanes), s = load_some_f32(sine + d, lanes);
                vec left = TYPED(load_some)(a + d, lanes), right = TYPED(load_some)(b + d, lanes);
                TYPED(store_some)(a + d, lanes, left * c - right * s);
                TYPED(store_some)(b + d, lanes, right * c + left * s);
            }
        }
}

/* out[rows][size] = silu(both[rows][:size]) * both[rows][size:] */
void TYPED(headrace_gate)(int64_t rows, int64_t size, const STORE *both, STORE *out) {
    for (int64_t i = 0; i < rows; i++, both += 2 * size, out += size)
        for (int64_t d = 0; d < size; d += LANES) {
            vec x = LOAD(both + d, size - d), small = exp_vec(-larger(x, -x)); /* e^-|x| */
            ivec positive = x > 0;
            vec top = (vec)((positive & (ivec)((vec){0} + 1.0f)) | (~positive & (ivec)small)); /* sigmoid(x) = top / (1 + small) */
            SAVE(out + d, size - d, x * top / (1.0f + small) * LOAD(both + size + d, size - d));
        }
}

/* scores[rows][PAGE] of one page */
INLINE void TYPED(score)(int rows, const float *query, const STORE *keys, int64_t size, vec scores[ROWS][PAGE / LANES]) {
    vec sum[ROWS][PAGE / LANES];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < PAGE / LANES; c++) sum[r][c] = (vec){0};
    for (int64_t d = 0; d < size; d++) {
        vec key[PAGE / LANES];
        for (int c = 0; c < PAGE / LANES; c++) {
            key[c] = TYPED(load_vec)(keys + d * PAGE + c * LANES);
            IN_REGISTER(key[c]);
        }
        for (int r = 0; r < rows; r++) {
            float q = query[d * ROWS + r];
            for (int c = 0; c < PAGE / LANES; c++) sum[r][c] += q * key[c];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < PAGE / LANES; c++) scores[r][c] = sum[r][c];
}

/* out[rows][columns of one block] = out * rescale + weights[rows][PAGE] @ values[PAGE][block]; two chains hide latency */
INLINE void TYPED(accumulate)(int rows, int vectors, const float weights[ROWS][PAGE], const STORE *values, int64_t size,
                              const float rescale[ROWS], float *out) {
    vec sum[2][ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < vectors; c++) {
            sum[0][r][c] = load_vec_f32(out + r * LONGEST + c * LANES) * rescale[r];
            sum[1][r][c] = (vec){0};
        }
    int chains = rows * vectors <= 8 ? 2 : 1;
    for (int k = 0; k < PAGE; k += 2)
        for (int odd = 0; odd < 2; odd++) {
            vec value[4];
            for (int c = 0; c < vectors; c++) {
                value[c] = TYPED(load_vec)(values + (k + odd) * size + c * LANES);
                IN_REGISTER(value[c]);
            }
            for (int r = 0; r < rows; r++)
                for (int c = 0; c < vectors; c++) sum[odd & (chains - 1)][r][c] += weights[r][k + odd] * value[c];
        }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < vectors; c++) *(vec *)(out + r * LONGEST + c * LANES) = sum[0][r][c] + sum[1][r][c];
}

INLINE void TYPED(accumulate_all)(int rows, const float weights[ROWS][PAGE], const STORE *values, int64_t size,
                                  const float rescale[ROWS], float *out) {
    int64_t done = 0;
    for (; done + 4 * LANES <= size; done += 4 * LANES) TYPED(accumulate)(rows, 4, weights, values + done, size, rescale, out + done);
    for (; done + 2 * LANES <= size; done += 2 * LANES) TYPED(accumulate)(rows, 2, weights, values + done, size, rescale, out + done);
    for (; done + LANES <= size; done += LANES) TYPED(accumulate)(rows, 1, weights, values + done, size, rescale, out + done);
    for (; done < size; done++)
        for (int r = 0; r < rows; r++) {
            float sum = out[r * LONGEST + done] * rescale[r];
            for (int k = 0; k < PAGE; k++) sum += weights[r][k] * TYPED(load)(values + k * size + done);
            out[r * LONGEST + done] = sum;
        }
}

/* ROWS or fewer query rows of one key/value head: row r belongs to the token at position[r] */
INLINE void TYPED(tile)(int rows, const Shape *shape, const float *query, const int64_t *position, const STORE *keys, const STORE *values,
                        const int64_t *pages, float *out) {
    float top[ROWS];
    vec sum[ROWS]; /* of the weights, by lane */
    int64_t first = position[0], last = position[0];
    for (int r = 0; r < rows; r++) {
        top[r] = HIDDEN, sum[r] = (vec){0};
        memset(out + r * LONGEST, 0, sizeof(float) * shape->value_size);
        first = position[r] < first ? position[r] : first;
        last = position[r] > last ? position[r] : last;
    }
    int64_t from = shape->window && first - shape->window + 1 > 0 ? (first - shape->window + 1) / PAGE : 0;
    for (int64_t page = from; page <= last / PAGE; page++) {
        vec scores[ROWS][PAGE / LANES];
        float weights[ROWS][PAGE], rescale[ROWS];
        if (page < last / PAGE) {
            prefetch(keys + pages[page + 1] * shape->shared * shape->size * PAGE, sizeof(STORE) * shape->size * PAGE);
            prefetch(values + pages[page + 1] * shape->shared * shape->value_size * PAGE, sizeof(STORE) * shape->value_size * PAGE);
        }
        TYPED(score)(rows, query, keys + pages[page] * shape->shared * shape->size * PAGE, shape->size, scores);
        for (int r = 0; r < rows; r++) {
            int64_t visible = position[r] - page * PAGE; /* last visible offset in this page */
            int64_t oldest = shape->window ? visible - shape->window + 1 : 0;
            if (visible < PAGE - 1 || oldest > 0) {
                float *score = (float *)scores[r];
                for (int k = 0; k < PAGE; k++) score[k] = k > visible || k < oldest ? HIDDEN : score[k];
            }
            float highest = largest(scores[r]);
            rescale[r] = 1;
            if (highest > top[r]) {
                rescale[r] = exp_vec((vec){0} + (top[r] - highest))[0];
                sum[r] *= rescale[r];
                top[r] = highest;
            }
            for (int c = 0; c < PAGE / LANES; c++) {
                vec weight = exp_vec(scores[r][c] - top[r]);
                *(vec *)(weights[r] + c * LANES) = weight;
                sum[r] += weight;
            }
        }
        TYPED(accumulate_all)(rows, weights, values + pages[page] * shape->shared * shape->value_size * PAGE, shape->value_size, rescale, out);
    }
    for (int r = 0; r < rows; r++) {
        float inverse = 1 / total(sum[r]);
        for (int64_t d = 0; d < shape->value_size; d++) out[r * LONGEST + d] *= inverse;
    }
}

static void TYPED(write)(const Shape *shape, int64_t count, int64_t start, const STORE *key, const STORE *value, STORE *keys, STORE *values,
                         const int64_t *pages) {
    for (int64_t i = 0; i < count; i++) {
        int64_t page = pages[(start + i) / PAGE], offset = (start + i) % PAGE;
        for (int64_t h = 0; h < shape->shared; h++) {
            STORE *to = keys + (page * shape->shared + h) * shape->size * PAGE + offset;
            const STORE *from = key + i * shape->key_row + h * shape->key_head;
            for (int64_t d = 0; d < shape->size; d++) to[d * PAGE] = from[d];
            memcpy(values + ((page * shape->shared + h) * PAGE + offset) * shape->value_size, value + i * shape->value_row + h * shape->value_head,
                   sizeof(STORE) * shape->value_size);
        }
    }
}

/* Write the new keys and values of every sequence and attend. Sequence b has count[b] new tokens at rows row[b].. of query,
 * key and value, and start[b] tokens before them; table[slot[b]] lists its pages. out is [rows][heads][value_size]. */
void TYPED(headrace_attend)(const Shape *shape, const STORE *query, const STORE *key, const STORE *value, STORE *keys, STORE *values,
                            const int64_t *table, const int64_t *slot, const int64_t *start, const int64_t *count, const int64_t *row,
                            STORE *out) {
    int64_t groups = shape->heads / shape->shared;
    float tile_query[LONGEST * ROWS], tile_out[ROWS * LONGEST];
    for (int64_t b = 0; b < shape->sequences; b++) {
        const int64_t *pages = table + slot[b] * shape->pages_per_slot;
        TYPED(write)(shape, count[b], start[b], key + row[b] * shape->key_row, value + row[b] * shape->value_row, keys, values, pages);
        for (int64_t h = 0; h < shape->shared; h++) {
            const STORE *head_keys = keys + h * shape->size * PAGE, *head_values = values + h * shape->value_size * PAGE;
            for (int64_t first = 0; first < count[b] * groups; first += ROWS) {
                int64_t rows = count[b] * groups - first, position[ROWS];
                rows = rows < ROWS ? rows : ROWS;
                for (int64_t r = 0; r < rows; r++) {
                    int64_t token = (first + r) / groups, head = h * groups + (first + r) % groups;
                    const STORE *from = query + (row[b] + token) * shape->query_row + head * shape->query_head;
                    position[r] = start[b] + token;
                    for (int64_t d = 0; d < shape->size; d++) tile_query[d * ROWS + r] = TYPED(load)(from + d) * shape->scale;
                }
#define TILE(n) TYPED(tile)(n, shape, tile_query, position, head_keys, head_values, pages, tile_out)
                switch (rows) { /* constants, so that each is compiled for its number of rows */
                    case 1: TILE(1); break;
                    case 2: TILE(2); break;
                    case 3: TILE(3); break;
                    case 4: TILE(4); break;
                    case 5: TILE(5); break;
                    default: TILE(6);
                }
#undef TILE
                for (int64_t r = 0; r < rows; r++) {
                    int64_t token = (first + r) / groups, head = h * groups + (first + r) % groups;
                    STORE *to = out + ((row[b] + token) * shape->heads + head) * shape->value_size;
                    for (int64_t d = 0; d < shape->value_size; d++) TYPED(store)(to + d, tile_out[r * LONGEST + d]);
                }
            }
        }
    }
}

#endif
