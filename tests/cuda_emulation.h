// Runs a CUDA kernel on a CPU: each thread is a fiber, the scheduler takes them in a random order and lets a warp or a
// block rest for a while, and asynchronous copies end at random times, so that a missing barrier or wait gives a wrong result.
#pragma once
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <ucontext.h>
#include <utility>
#include <vector>

#define DEVICE inline
#define __global__
#define __launch_bounds__(...)

typedef unsigned short half_t;
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int max(int a, int b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

namespace emulation {

struct Rendezvous { int arrived = 0, generation = 0; };
struct Warp { Rendezvous meeting; unsigned values[32]; };
struct BlockState { Rendezvous meeting; std::vector<Warp> warps; std::vector<char> memory; };
struct Fiber {
    ucontext_t context;  // to begin with; _setjmp and _longjmp then switch without a system call
    jmp_buf place;
    bool begun = false;
    std::vector<char> stack;
    int thread, block;
    bool done = false;
    const int* waits_on = nullptr;  // runs again when this differs from `generation`
    int generation = 0;
};
struct Copy { char* to; const char* from; unsigned bytes; unsigned long long* barrier; };

inline std::vector<Fiber> fibers;
inline std::vector<BlockState> blocks;
inline std::vector<Copy> copies;
inline std::function<void()> kernel;
inline std::mt19937 random;
inline ucontext_t beginning;
inline jmp_buf scheduler;
inline Fiber* current;

inline void yield() {
    if (!_setjmp(current->place)) _longjmp(scheduler, 1);
}

inline void run(Fiber& fiber) {
    current = &fiber;
    if (_setjmp(scheduler)) return;
    if (fiber.begun) _longjmp(fiber.place, 1);
    fiber.begun = true;
    swapcontext(&beginning, &fiber.context);
}

inline void meet(Rendezvous& meeting, int size) {
    const int generation = meeting.generation;
    if (++meeting.arrived == size) {
        meeting.arrived = 0;
        meeting.generation++;
        return;
    }
    current->waits_on = &meeting.generation;
    current->generation = generation;
    yield();
    current->waits_on = nullptr;
}

inline BlockState& block() { return blocks[current->block]; }
inline Warp& warp() { return block().warps[current->thread / 32]; }

inline void end_copy() {
    const size_t number = random() % copies.size();
    const Copy copy = copies[number];
    copies[number] = copies.back();
    copies.pop_back();
    memcpy(copy.to, copy.from, copy.bytes);
    // The lower half counts the bytes that are still expected, the upper half the phases that have ended.
    if ((unsigned)(*copy.barrier -= copy.bytes) == 0) *copy.barrier += 1ull << 32;
}

inline void start() {
    kernel();
    current->done = true;
    yield();
}

// Returns false if the threads wait for one another for ever.
inline bool launch(int num_blocks, int threads, size_t memory, unsigned seed, std::function<void()> body) {
    random.seed(seed);
    kernel = body;
    copies.clear();
    blocks.assign(num_blocks, {});
    for (auto& block : blocks) {
        block.warps.resize(threads / 32);
        block.memory.assign(memory + 128, (char)0xff);  // NaN
    }
    fibers = std::vector<Fiber>(num_blocks * threads);
    std::vector<int> order;
    for (size_t i = 0; i < fibers.size(); i++) {
        Fiber& fiber = fibers[i];
        fiber.stack.resize(1 << 16);
        fiber.thread = i % threads, fiber.block = i / threads;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        makecontext(&fiber.context, start, 0);
        order.push_back(i);
    }
    for (int round = 0, idle = 0, resting = 0, size = 0; !order.empty() && idle < 100000; round++) {
        if (round % 64 == 0) {  // every other time a block, else a warp
            size = round % 128 ? 32 : threads;
            resting = random() % (fibers.size() / size);
        }
        const int first = random() % order.size();
        bool ran = false;
        for (size_t n = 0; n < order.size(); n++) {
            Fiber& fiber = fibers[order[(first + n) % order.size()]];
            if (fiber.waits_on && *fiber.waits_on == fiber.generation) continue;
            if (order[(first + n) % order.size()] / size == resting || random() % 4 == 0) continue;
            run(fiber);
            ran = ran || fiber.done || fiber.waits_on;
        }
        if (!copies.empty() && random() % 2) end_copy(), ran = true;
        idle = ran ? 0 : idle + 1;
        std::erase_if(order, [](int i) { return fibers[i].done; });
    }
    return order.empty();
}

struct Thread { struct { operator int() const { return current->thread; } } x; };
struct Block { struct { operator int() const { return current->block; } } x; };
struct Grid { struct { operator int() const { return (int)blocks.size(); } } x; };

}  // namespace emulation

inline emulation::Thread threadIdx;
inline emulation::Block blockIdx;
inline emulation::Grid gridDim;

inline void __syncthreads() { emulation::meet(emulation::block().meeting, emulation::block().warps.size() * 32); }
inline void __syncwarp() { emulation::meet(emulation::warp().meeting, 32); }
inline void __threadfence() {}

template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    static_assert(sizeof(T) == 4);
    auto& warp = emulation::warp();
    const int lane = emulation::current->thread % 32;
    memcpy(&warp.values[lane], &value, 4);
    __syncwarp();
    memcpy(&value, &warp.values[lane ^ mask], 4);
    __syncwarp();
    return value;
}

template <typename T> T __ldg(const T* at) { return *at; }
template <typename T> T __ldcg(const T* at) { return *at; }
inline unsigned atomicAdd(unsigned* at, unsigned value) { return (*at += value) - value; }

inline char* shared_memory() {
    return (char*)(((uintptr_t)emulation::block().memory.data() + 127) & ~(uintptr_t)127);
}

inline float widen(half_t x) {
#if FP16
    _Float16 y;
    memcpy(&y, &x, 2);
    return y;
#else
    const unsigned bits = (unsigned)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
#endif
}

inline half_t narrow(float x) {
#if FP16
    const _Float16 y = x;
    half_t bits;
    memcpy(&bits, &y, 2);
    return bits;
#else
    unsigned bits;
    memcpy(&bits, &x, 4);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
#endif
}

inline void init_barrier(unsigned long long* barrier) { *barrier = 0; }
inline void fence_barriers() {}
inline void expect_bytes(unsigned long long* barrier, unsigned bytes) { *barrier += bytes; }
inline void copy_ahead(void* to, const void* from, unsigned bytes, unsigned long long* barrier) {
    emulation::copies.push_back({(char*)to, (const char*)from, bytes, barrier});
}
inline void wait_for_bytes(unsigned long long* barrier, unsigned parity) {
    while ((*barrier >> 32 & 1) == parity) emulation::yield();
}
inline void add_release(unsigned* counter) { ++*counter; }
inline unsigned load_acquire(const unsigned* counter) {
    emulation::yield();
    return *counter;
}

namespace emulation {

// Calls a kernel with arguments given as pointers to them, as cuLaunchKernel takes them.
template <typename... A, size_t... I>
void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    kernel(*(A*)arguments[I]...);
}

template <typename... A>
bool launch(void (*kernel)(A...), int blocks, int threads, size_t memory, unsigned seed, void** arguments) {
    return launch(blocks, threads, memory, seed,
                  [=] { call(kernel, arguments, std::make_index_sequence<sizeof...(A)>()); });
}

}  // namespace emulation
