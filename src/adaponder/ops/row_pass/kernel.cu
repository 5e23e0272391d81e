// Runs all decoder layers over one row in a single launch. __init__.py explains the design and defines the constants:
//
//   D, INNER           hidden size, size between the MLP's products
//   HEADS, KEY_HEADS, SIZE, ROTARY   query heads, key heads, head size, rotated elements of a head
//   LAYERS, PARALLEL   layers; 1: attention and MLP read the same residual stream (GPT-NeoX)
//   PACKED, GATED      1: each head's query, key and value are adjacent rows of one matrix; 1: the MLP is gated
//   NORM, AFTER        1: LayerNorm, 2: RMSNorm; 1: a norm also after attention and after the MLP
//   HEAD_NORM          1: RMS norms of each query and key head, with HEAD_EPSILON
//   ACTIVATION         as in row_linear/kernels.py: 1 GELU, 2 GELU by tanh, 3 ReLU, 4 SiLU
//   FP16               1: weights are float16, 0: bfloat16
//   SCALE              of the scores, over ln 2
//   THREADS, SEGMENT, SLOTS   threads of a block; inputs of a task; tasks that a warp loads ahead
//   MOST_TASKS         the most tasks of a block in one product

#ifdef EMULATED  // on a CPU, for tests
#include "cuda_emulation.h"
#else
#define DEVICE __device__ __forceinline__
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
typedef unsigned short half_t;

DEVICE char* shared_memory() { extern __shared__ __align__(128) char memory[]; return memory; }

DEVICE float widen(half_t x) {
#if FP16
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
#else
    return __uint_as_float((unsigned)x << 16);
#endif
}

DEVICE half_t narrow(float x) {
    half_t y;
#if FP16
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
#else
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
#endif
    return y;
}

DEVICE unsigned address_of(const void* shared) { return (unsigned)__cvta_generic_to_shared(shared); }

// An mbarrier counts the bytes of asynchronous copies.
DEVICE void init_barrier(unsigned long long* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address_of(barrier)));
}

DEVICE void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void expect_bytes(unsigned long long* barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address_of(barrier)), "r"(bytes)
                 : "memory");
}

DEVICE void copy_ahead(void* shared, const void* global, unsigned bytes, unsigned long long* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     address_of(shared)), "l"(global), "r"(bytes), "r"(address_of(barrier))
                 : "memory");
}

DEVICE void wait_for_bytes(unsigned long long* barrier, unsigned parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(address_of(barrier)), "r"(parity) : "memory");
}

DEVICE void add_release(unsigned* counter) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

DEVICE unsigned load_acquire(const unsigned* counter) {
    unsigned value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    return value;
}
#endif

namespace {

constexpr int WARPS = THREADS / 32, EACH = D / THREADS, WIDTH = HEADS * SIZE;
constexpr int QUERY_STEP = (PACKED ? 3 : 1) * SIZE;                      // from a head to the next in the QKV product
constexpr int FIRST_KEY = PACKED ? SIZE : WIDTH, VALUE_STEP = PACKED ? SIZE : KEY_HEADS * SIZE;
constexpr int KEY_LANES = SIZE / 8, KEYS = 32 / KEY_LANES, STEPS = 4;    // lanes per key, keys of a warp's step
constexpr int BLOCK_KEYS = WARPS * KEYS * STEPS;                         // keys that a block attends to at a time
constexpr int PARTIAL = SIZE + 4;                                        // sums of values, maximum, sum of weights
constexpr int QKV = WIDTH + 2 * KEY_HEADS * SIZE;

// A layer's row of the table of addresses.
enum Entry { NORM_1, SHIFT_1, NORM_2, SHIFT_2, AFTER_1, AFTER_2, Q, Q_BIAS, K, K_BIAS, V, V_BIAS, OUT, OUT_BIAS, GATE,
             GATE_BIAS, UP, UP_BIAS, DOWN, DOWN_BIAS, QUERY_NORM, KEY_NORM, KEY_POOL, VALUE_POOL, WINDOW, ENTRIES };

// The products of a layer, in the order in which their weights are loaded.
enum Product { ENTER, LEAVE, MIX, WIDEN, PRODUCTS = PARALLEL ? 3 : 4 };
// PARALLEL: ENTER is QKV and up, LEAVE is down, MIX is out. Else ENTER is QKV, LEAVE is out, MIX is up, WIDEN is down.
constexpr int OUT_PRODUCT = PARALLEL ? MIX : LEAVE, DOWN_PRODUCT = PARALLEL ? LEAVE : WIDEN;
constexpr int GATED_PRODUCT = PARALLEL ? -1 : MIX;

DEVICE constexpr int inputs_of(int product) {
    return product == OUT_PRODUCT ? WIDTH : product == DOWN_PRODUCT ? INNER : D;
}

DEVICE constexpr int pairs_of(int product) {
    return product == OUT_PRODUCT || product == DOWN_PRODUCT ? D / 2
         : product == ENTER ? QKV / 2 + (PARALLEL ? INNER / 2 : 0) : GATED ? INNER : INNER / 2;
}

// The shared memory of a block.
struct Shared {
    half_t ring[WARPS][SLOTS][2][SEGMENT];
    alignas(16) float normed[2][D];                       // the residual stream after each norm
    alignas(16) float vector[WIDTH > INNER ? WIDTH : INNER];
    float sums[2][MOST_TASKS][2];                         // [which product][task][row of its pair]
    alignas(16) float partial[WARPS][PARTIAL];
    float reduced[2][WARPS];
    float cosine[SIZE], sine[SIZE];                       // of the row's position
    unsigned long long loaded[WARPS][SLOTS];
    const half_t* table[LAYERS][ENTRIES];
    int first_pair[PRODUCTS], pair_count[PRODUCTS];       // this block's share of each product
};

static_assert(sizeof(Shared) <= SHARED_BYTES, "the ring has too many slots");

// What a launch works on; pointers are to global memory.
struct Arguments {
    const half_t *x, *final_norm, *final_shift;
    half_t *hidden, *stream;
    const int* index;
    const long long *lane, *slot, *iteration, *row, *position;
    const float *cos, *sin;
    float *qkv, *inner, *partial, *delta;
    unsigned* counter;
    int index_lane, index_iteration;
    float epsilon, head_epsilon;
};

DEVICE float activate(float x) {
    if (ACTIVATION == 1) return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    if (ACTIVATION == 2) return x / (1.0f + expf(-2.0f * 0.79788456f * (x + 0.044715f * x * x * x)));
    if (ACTIVATION == 3) return fmaxf(x, 0.0f);
    return x / (1.0f + expf(-x));
}

// Where element k of a vector is stored, so that the 32 lanes of a warp read 16 bytes each without bank conflicts.
DEVICE int stored_at(int k) { return (k & ~255) + ((k & 4) << 5) + ((k & 248) >> 1) + (k & 3); }

DEVICE float widened(const half_t* values, int k) { return values == nullptr ? 0.0f : widen(values[k]); }

struct Block {
    Shared& shared;
    const Arguments& arguments;
    const int thread, warp, lane, number, blocks;
    const int place;         // the row's slot in its sequence
    const int* const ids;    // the pool rows that it reads
    const long long row;     // the pool row that it writes
    float x[EACH];           // the residual stream; each block has all of it
    unsigned barriers = 0;   // grid barriers that this block has reached
    unsigned issued = 0, used = 0;
    int next_layer = 0, next_product = 0, next_task;

    DEVICE Block(Shared& shared, const Arguments& arguments, int thread, int number, int blocks)
        : shared(shared), arguments(arguments), thread(thread), warp(thread >> 5), lane(thread & 31), number(number),
          blocks(blocks), place((int)*arguments.slot),
          ids(arguments.index + *arguments.lane * (long long)arguments.index_lane
              + *arguments.iteration * (long long)arguments.index_iteration),
          row(*arguments.row), next_task(thread >> 5) {}

    DEVICE int first_pair(int product) const { return shared.first_pair[product]; }
    DEVICE int pair_count(int product) const { return shared.pair_count[product]; }
    DEVICE int segments(int product) const { return inputs_of(product) / SEGMENT; }
    DEVICE int tasks(int product) const { return pair_count(product) * segments(product); }

    // The two rows of weights of a pair, from input `start` on.
    DEVICE void locate(int layer, int product, int pair, int start, const half_t*& first, const half_t*& second) const {
        const half_t* const* weights = shared.table[layer];
        const long long inputs = inputs_of(product);
        int entry = product == OUT_PRODUCT ? OUT : product == DOWN_PRODUCT ? DOWN : product == ENTER ? Q : UP;
        if (product == ENTER && pair >= QKV / 2) {
            entry = UP;
            pair -= QKV / 2;
        } else if (product == ENTER && !PACKED && pair >= WIDTH / 2) {
            const bool value = pair >= (WIDTH + KEY_HEADS * SIZE) / 2;
            entry = value ? V : K;
            pair -= (WIDTH + (value ? KEY_HEADS * SIZE : 0)) / 2;
        } else if (GATED && product == GATED_PRODUCT) {
            first = weights[GATE] + pair * inputs + start;
            second = weights[UP] + pair * inputs + start;
            return;
        }
        const half_t* matrix = weights[entry];
        first = matrix + 2 * pair * inputs + start;
        second = first + inputs;
    }

    // Begins to load the weights of this warp's next task, if there is one.
    DEVICE void load_next() {
        while (next_layer < LAYERS && next_task >= tasks(next_product)) {
            next_task = warp;
            if (++next_product == PRODUCTS) { next_product = 0; next_layer++; }
        }
        if (next_layer == LAYERS) return;
        if (lane == 0) {
            const int slot = issued % SLOTS, count = segments(next_product);
            const half_t *first, *second;
            locate(next_layer, next_product, first_pair(next_product) + next_task / count,
                   next_task % count * SEGMENT, first, second);
            unsigned long long* barrier = &shared.loaded[warp][slot];
            expect_bytes(barrier, 2 * SEGMENT * sizeof(half_t));
            copy_ahead(shared.ring[warp][slot][0], first, SEGMENT * sizeof(half_t), barrier);
            copy_ahead(shared.ring[warp][slot][1], second, SEGMENT * sizeof(half_t), barrier);
        }
        issued++;
        next_task += WARPS;
    }

    // Computes this warp's tasks of a product: for each pair and segment the sums of weight times input.
    template <typename Input>
    DEVICE void multiply(int product, int place, Input input) {
        const int count = segments(product), total = tasks(product);
        for (int task = warp; task < total; task += WARPS) {
            const int slot = used % SLOTS;
            wait_for_bytes(&shared.loaded[warp][slot], used / SLOTS & 1);
            const float* values_at = input(first_pair(product) + task / count) + task % count * SEGMENT;
            float sums[2] = {0.0f, 0.0f};
#pragma unroll
            for (int start = 0; start < SEGMENT; start += 256) {
                float values[8];
                *(float4*)values = *(const float4*)(values_at + start + 4 * lane);
                *(float4*)(values + 4) = *(const float4*)(values_at + start + 128 + 4 * lane);
#pragma unroll
                for (int which = 0; which < 2; which++) {
                    const uint4 eight = *(const uint4*)(shared.ring[warp][slot][which] + start + 8 * lane);
                    const unsigned two[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        sums[which] += widen((half_t)(two[i] & 0xffff)) * values[2 * i];
                        sums[which] += widen((half_t)(two[i] >> 16)) * values[2 * i + 1];
                    }
                }
            }
            __syncwarp();  // all lanes have read the slot
            used++;
            load_next();
            // Lanes 0 to 15 sum the first row, the others the second.
            float sum = lane < 16 ? sums[0] : sums[1];
            sum += __shfl_xor_sync(~0u, lane < 16 ? sums[1] : sums[0], 16);
            for (int step = 8; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
            if ((lane & 15) == 0) shared.sums[place][task][lane >> 4] = sum;
        }
    }

    DEVICE float summed(int product, int place, int pair, int which) const {
        float sum = 0.0f;
        for (int i = 0, count = segments(product); i < count; i++) sum += shared.sums[place][pair * count + i][which];
        return sum;
    }

    // All blocks arrive, and each waits until all have; what was written before is visible after.
    DEVICE void arrive() {
        __syncthreads();
        barriers++;
        if (thread == 0) add_release(arguments.counter);
    }

    DEVICE void wait() {
        if (thread == 0)
            while (load_acquire(arguments.counter) < barriers * blocks) {}
        __syncthreads();
    }

    // Returns (mean, mean squared deviation) of the block's values, or (0, mean square).
    DEVICE float2 moments(const float (&values)[EACH], bool centred) {
        float mean = 0.0f, square = 0.0f, size = EACH;
        if (centred) {
            for (int i = 0; i < EACH; i++) mean += values[i];
            mean /= EACH;
        }
        for (int i = 0; i < EACH; i++) square += (values[i] - mean) * (values[i] - mean);
        auto merge = [&](float other_mean, float other_square) {
            const float apart = mean - other_mean;
            square += other_square + apart * apart * size * 0.5f;
            mean = 0.5f * (mean + other_mean);
            size *= 2.0f;
        };
        for (int step = 16; step; step >>= 1)
            merge(__shfl_xor_sync(~0u, mean, step), __shfl_xor_sync(~0u, square, step));
        __syncthreads();  // earlier readers are done
        if (lane == 0) { shared.reduced[0][warp] = mean; shared.reduced[1][warp] = square; }
        __syncthreads();
        mean = shared.reduced[0][lane % WARPS];
        square = shared.reduced[1][lane % WARPS];
        for (int step = WARPS / 2; step; step >>= 1)
            merge(__shfl_xor_sync(~0u, mean, step), __shfl_xor_sync(~0u, square, step));
        return make_float2(mean, square / D);
    }

    // Writes `norm(x)`, or two norms of x, to shared memory; `ready` waits for what is added to x.
    template <typename Ready>
    DEVICE void enter(const half_t* const* gains, int count, const half_t* after, Ready ready) {
        float gain[2][EACH], shift[2][EACH], after_gain[EACH];
        for (int i = 0; i < EACH; i++) {  // before the wait
            const int k = thread + i * THREADS;
            for (int n = 0; n < count; n++) {
                gain[n][i] = widened(gains[2 * n], k);
                shift[n][i] = widened(gains[2 * n + 1], k);
            }
            after_gain[i] = AFTER ? widened(after, k) : 1.0f;
        }
        if (ready()) {
            float added[EACH];
            for (int i = 0; i < EACH; i++) added[i] = __ldcg(arguments.delta + thread + i * THREADS);
            float power = 1.0f;
            if (AFTER) power = rsqrtf(moments(added, false).y + arguments.epsilon);
            for (int i = 0; i < EACH; i++) x[i] += added[i] * power * after_gain[i];
        }
        const float2 moment = moments(x, NORM == 1);
        const float power = rsqrtf(moment.y + arguments.epsilon);
        for (int i = 0; i < EACH; i++) {
            const int k = stored_at(thread + i * THREADS);
            for (int n = 0; n < count; n++)
                shared.normed[n][k] = (x[i] - moment.x) * power * gain[n][i] + shift[n][i];
        }
        __syncthreads();
    }

    DEVICE void read_vector(const float* global, int size) {
        for (int k = 4 * thread; k < size; k += 4 * THREADS)
            *(float4*)(shared.vector + stored_at(k)) = __ldcg((const float4*)(global + k));
        __syncthreads();
    }

    // The bias of a row of a product; of both rows of a gated pair the second's.
    DEVICE float bias_of(int layer, int product, int row) const {
        const half_t* const* weights = shared.table[layer];
        if (product == OUT_PRODUCT)
            return widened(weights[OUT_BIAS], row) + (PARALLEL ? widened(weights[DOWN_BIAS], row) : 0.0f);
        if (product == DOWN_PRODUCT) return widened(weights[DOWN_BIAS], row);
        if (product == GATED_PRODUCT) return widened(weights[UP_BIAS], row);
        const int key = row - WIDTH, value = key - KEY_HEADS * SIZE;
        if (row >= QKV) return widened(weights[UP_BIAS], row - QKV);
        if (PACKED || key < 0) return widened(weights[Q_BIAS], row);
        return value < 0 ? widened(weights[K_BIAS], key) : widened(weights[V_BIAS], value);
    }

    // Computes a product and hands `leave` the number and the sum of each of the block's rows; biases are loaded ahead.
    template <typename Input, typename Leave>
    DEVICE void compute(int layer, int product, Input input, Leave leave) {
        const bool pairs = GATED && product == GATED_PRODUCT;
        const int first = first_pair(product) * (pairs ? 1 : 2), count = pair_count(product) * (pairs ? 1 : 2);
        float bias = thread < count ? bias_of(layer, product, first + thread) : 0.0f;
        multiply(product, 0, input);
        __syncthreads();
        for (int i = thread; i < count; i += THREADS) {
            if (i >= THREADS) bias = bias_of(layer, product, first + i);
            leave(first + i, bias + (pairs ? summed(product, 0, i, 1) : summed(product, 0, i / 2, i & 1)), i);
        }
    }

    struct Keys {
        int row[STEPS];
        uint4 key[STEPS], value[STEPS];
    };

    DEVICE void load_keys(Keys& block, const half_t* keys, const half_t* values, int start, int end) {
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            const int at = start + (i * WARPS + warp) * KEYS + lane / KEY_LANES;
            block.row[i] = at < end ? ids[at] : -1;
        }
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            const long long at = (long long)max(block.row[i], 0) * KEY_HEADS * SIZE + lane % KEY_LANES * 8;
            block.key[i] = block.value[i] = make_uint4(0, 0, 0, 0);
            if (block.row[i] >= 0) {
                block.key[i] = __ldcg((const uint4*)(keys + at));
                block.value[i] = __ldcg((const uint4*)(values + at));
            }
        }
    }

    DEVICE void unpack(const uint4& eight, float (&values)[8]) const {
        const unsigned two[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            values[2 * i] = widen((half_t)(two[i] & 0xffff));
            values[2 * i + 1] = widen((half_t)(two[i] >> 16));
        }
    }

    // Reads this lane's eight elements of a head of the QKV product, normed and rotated.
    DEVICE void read_head(const float* head, const half_t* norm, float (&values)[8]) const {
        const int first = lane % KEY_LANES * 8;
        float power = 1.0f, partner[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {  // all loads before their first use
            const int k = first + i, other = k < ROTARY / 2 ? k + ROTARY / 2 : k - ROTARY / 2;
            values[i] = __ldcg(head + k);
            partner[i] = k < ROTARY ? __ldcg(head + other) : 0.0f;
            if (HEAD_NORM) partner[i] *= k < ROTARY ? widen(norm[other]) : 0.0f;
        }
        if (HEAD_NORM) {
            float square = 0.0f;
            for (int i = 0; i < 8; i++) square += values[i] * values[i];
            for (int step = KEY_LANES / 2; step; step >>= 1) square += __shfl_xor_sync(~0u, square, step);
            power = rsqrtf(square / SIZE + arguments.head_epsilon);
            for (int i = 0; i < 8; i++) values[i] *= power * widen(norm[first + i]);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int k = first + i;
            if (k < ROTARY)
                values[i] = values[i] * shared.cosine[k]
                          + (k < ROTARY / 2 ? -power : power) * partner[i] * shared.sine[k];
        }
    }

    // Attends with the row's query to its keys, each block with one head and one part of the keys.
    template <typename Ready>
    DEVICE void attend(int layer, int& splits, Ready ready) {
        const half_t* const* weights = shared.table[layer];
        const int window = (int)(long long)weights[WINDOW];
        const int begin = window > 0 ? max(place + 1 - window, 0) : 0, length = place - begin;
        const int most = max(blocks / HEADS, 1), share = (length + most - 1) / most;
        const int span = max((share + BLOCK_KEYS - 1) / BLOCK_KEYS, 1) * BLOCK_KEYS;
        splits = max((length + span - 1) / span, 1);
        half_t* const key_pool = const_cast<half_t*>(weights[KEY_POOL]);
        half_t* const value_pool = const_cast<half_t*>(weights[VALUE_POOL]);
        Keys block;
        if (number < HEADS * splits) {
            const int group = number % HEADS / (HEADS / KEY_HEADS) * SIZE, start = begin + number / HEADS * span;
            load_keys(block, key_pool + group, value_pool + group, start, min(start + span, place));
        }
        ready();
        for (int item = number; item < HEADS * splits; item += blocks) {
            const int head = item % HEADS, split = item / HEADS, group = head / (HEADS / KEY_HEADS);
            const half_t *keys = key_pool + group * SIZE, *values = value_pool + group * SIZE;
            const int first = begin + split * span, end = min(first + span, place);
            float query[8], sums[8], top = -INFINITY, total = 0.0f;
            read_head(arguments.qkv + head * QUERY_STEP, weights[QUERY_NORM], query);
            for (int i = 0; i < 8; i++) sums[i] = 0.0f;
            if (split == 0 && warp == 0) {  // the row's own key and value
                float key[8], score = 0.0f;
                const float* at = arguments.qkv + FIRST_KEY + group * QUERY_STEP;
                read_head(at, weights[KEY_NORM], key);
                const bool writes = lane < KEY_LANES && head % (HEADS / KEY_HEADS) == 0 && row >= 0;
                const long long place = (row * KEY_HEADS + group) * SIZE + lane % KEY_LANES * 8;
                for (int i = 0; i < 8; i++) {
                    const half_t rounded = narrow(key[i]);
                    const half_t value = narrow(__ldcg(at + VALUE_STEP + lane % KEY_LANES * 8 + i));
                    score += query[i] * widen(rounded);
                    if (lane < KEY_LANES) sums[i] = widen(value);
                    if (writes) { key_pool[place + i] = rounded; value_pool[place + i] = value; }
                }
                for (int step = KEY_LANES / 2; step; step >>= 1) score += __shfl_xor_sync(~0u, score, step);
                if (lane < KEY_LANES) { top = score * SCALE; total = 1.0f; }
            }
            for (int start = first; start < end || start == first; start += BLOCK_KEYS) {
                if (item != number || start != first) load_keys(block, keys, values, start, end);
                float score[STEPS], higher = top;
#pragma unroll
                for (int i = 0; i < STEPS; i++) {
                    float key[8];
                    unpack(block.key[i], key);
                    score[i] = 0.0f;
                    for (int n = 0; n < 8; n++) score[i] += query[n] * key[n];
                    for (int step = KEY_LANES / 2; step; step >>= 1)
                        score[i] += __shfl_xor_sync(~0u, score[i], step);
                    score[i] = block.row[i] < 0 ? -INFINITY : score[i] * SCALE;
                    higher = fmaxf(higher, score[i]);
                }
                if (higher > -INFINITY) {
                    const float fading = exp2f(top - higher);
                    total *= fading;
                    for (int n = 0; n < 8; n++) sums[n] *= fading;
#pragma unroll
                    for (int i = 0; i < STEPS; i++) {
                        const float weight = exp2f(score[i] - higher);
                        float value[8];
                        unpack(block.value[i], value);
                        total += weight;
                        for (int n = 0; n < 8; n++) sums[n] += weight * value[n];
                    }
                    top = higher;
                }
            }
            merge_block(top, total, sums, arguments.partial + (head * most + split) * PARTIAL);
        }
    }

    // Merges the online softmaxes of all lanes of the block and writes the result.
    DEVICE void merge_block(float top, float total, float (&sums)[8], float* result) {
        float highest = top;
        for (int step = KEY_LANES; step < 32; step <<= 1)
            highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, step));
        const float fading = top > -INFINITY ? exp2f(top - highest) : 0.0f;
        total *= fading;
        for (int n = 0; n < 8; n++) sums[n] *= fading;
        for (int step = KEY_LANES; step < 32; step <<= 1) {
            total += __shfl_xor_sync(~0u, total, step);
            for (int n = 0; n < 8; n++) sums[n] += __shfl_xor_sync(~0u, sums[n], step);
        }
        __syncthreads();  // earlier readers are done
        if (lane < KEY_LANES) {
            for (int n = 0; n < 8; n++) shared.partial[warp][lane * 8 + n] = sums[n];
            if (lane == 0) { shared.partial[warp][SIZE] = highest; shared.partial[warp][SIZE + 1] = total; }
        }
        __syncthreads();
        if (thread < SIZE + 2) {
            float level = -INFINITY, sum = 0.0f;
            for (int i = 0; i < WARPS; i++) level = fmaxf(level, shared.partial[i][SIZE]);
            for (int i = 0; i < WARPS; i++) {
                const float own = shared.partial[i][SIZE];
                if (own > -INFINITY) sum += exp2f(own - level) * shared.partial[i][thread];
            }
            result[thread] = thread == SIZE ? level : sum;
        }
    }

    // Combines the parts of each head's keys into the attention's result, in shared memory.
    DEVICE void read_attention(int splits) {
        const int most = max(blocks / HEADS, 1);
        for (int k = 4 * thread; k < WIDTH; k += 4 * THREADS) {
            const float* part = arguments.partial + k / SIZE * most * PARTIAL;
            float level = -INFINITY, total = 0.0f;
            float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
            for (int i = 0; i < splits; i++, part += PARTIAL) {
                const float top = __ldcg(part + SIZE), weights = __ldcg(part + SIZE + 1);
                const float4 values = __ldcg((const float4*)(part + k % SIZE));
                const float higher = fmaxf(level, top);
                if (higher == -INFINITY) continue;
                const float fading = exp2f(level - higher), share = exp2f(top - higher);
                total = total * fading + weights * share;
                sum.x = sum.x * fading + values.x * share; sum.y = sum.y * fading + values.y * share;
                sum.z = sum.z * fading + values.z * share; sum.w = sum.w * fading + values.w * share;
                level = higher;
            }
            const float factor = 1.0f / total;
            *(float4*)(shared.vector + stored_at(k)) =
                make_float4(sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor);
        }
        __syncthreads();
    }

    DEVICE void layer(int number_of_layer) {
        const half_t* const* weights = shared.table[number_of_layer];
        const half_t* const* before = shared.table[max(number_of_layer - 1, 0)];
        const half_t* gains[4] = {weights[NORM_1], weights[SHIFT_1], weights[NORM_2], weights[SHIFT_2]};
        auto ready = [&] { if (number_of_layer) wait(); return number_of_layer > 0; };
        enter(gains, PARALLEL ? 2 : 1, before[AFTER_2], ready);
        compute(number_of_layer, ENTER, [&](int pair) { return shared.normed[pair >= QKV / 2]; },
                [&](int row, float sum, int) {
                    if (row < QKV) arguments.qkv[row] = sum;
                    else arguments.inner[row - QKV] = activate(sum);
                });
        arrive();
        int splits;
        attend(number_of_layer, splits, [&] { wait(); });
        arrive();
        auto vector = [&](int) { return shared.vector; };
        if (PARALLEL) {  // the down product does not need attention
            read_vector(arguments.inner, INNER);
            multiply(DOWN_PRODUCT, 1, vector);
        }
        wait();
        read_attention(splits);
        compute(number_of_layer, OUT_PRODUCT, vector, [&](int row, float sum, int i) {
            arguments.delta[row] = PARALLEL ? sum + summed(DOWN_PRODUCT, 1, i / 2, i & 1) : sum;
        });
        arrive();
        if (!PARALLEL) {
            enter(gains + 2, 1, weights[AFTER_1], [&] { wait(); return true; });
            compute(number_of_layer, MIX, [&](int) { return shared.normed[0]; }, [&](int row, float sum, int i) {
                if (GATED) sum *= activate(summed(MIX, 0, i, 0) + widened(weights[GATE_BIAS], row));
                arguments.inner[row] = GATED ? sum : activate(sum);
            });
            arrive();
            wait();
            read_vector(arguments.inner, INNER);
            compute(number_of_layer, DOWN_PRODUCT, vector,
                    [&](int row, float sum, int) { arguments.delta[row] = sum; });
            arrive();
        }
    }

    DEVICE void run(const long long* table) {
        for (int i = thread; i < LAYERS * ENTRIES; i += THREADS)
            (&shared.table[0][0])[i] = (const half_t*)__ldg(table + i);
        if (lane == 0)
            for (int i = 0; i < SLOTS; i++) init_barrier(&shared.loaded[warp][i]);
        fence_barriers();
        if (thread < PRODUCTS) {
            const int pairs = pairs_of(thread);
            shared.first_pair[thread] = pairs * number / blocks;
            shared.pair_count[thread] = pairs * (number + 1) / blocks - pairs * number / blocks;
        }
        if (thread < ROTARY) {
            shared.cosine[thread] = arguments.cos[*arguments.position * ROTARY + thread];
            shared.sine[thread] = arguments.sin[*arguments.position * ROTARY + thread];
        }
        for (int i = 0; i < EACH; i++) x[i] = widen(arguments.x[thread + i * THREADS]);
        __syncthreads();
        for (int i = 0; i < SLOTS; i++) load_next();
        for (int i = 0; i < LAYERS; i++) layer(i);
        const half_t* gains[2] = {arguments.final_norm, arguments.final_shift};
        enter(gains, 1, shared.table[LAYERS - 1][AFTER_2], [&] { wait(); return true; });
        for (int i = 0; i < EACH; i++) {
            const int k = thread + i * THREADS;
            if (k % blocks != number) continue;
            arguments.stream[k] = narrow(x[i]);
            arguments.hidden[k] = narrow(shared.normed[0][stored_at(k)]);
        }
        // The last block to leave resets the counters for the next launch.
        if (thread == 0) {
            __threadfence();
            if (atomicAdd(arguments.counter + 1, 1u) == (unsigned)blocks - 1)
                arguments.counter[0] = arguments.counter[1] = 0;
        }
    }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) row_pass(
    const half_t* x, half_t* hidden, half_t* stream, const long long* table, const half_t* final_norm,
    const half_t* final_shift, const int* index, const long long* lane, const long long* slot,
    const long long* iteration, const long long* row, const long long* position, const float* cos, const float* sin,
    const float* epsilons, float* scratch, unsigned* counter, int shifted, int index_lane, int index_iteration) {
    float *const inner = scratch + QKV, *const delta = inner + INNER;
    const Arguments arguments = {x, final_norm, shifted ? final_shift : nullptr, hidden, stream, index, lane, slot,
                                 iteration, row, position, cos, sin, scratch, inner, delta + D, delta, counter,
                                 index_lane, index_iteration, epsilons[0], epsilons[1]};
    Block block(*(Shared*)shared_memory(), arguments, threadIdx.x, blockIdx.x, gridDim.x);
    block.run(table);
}
