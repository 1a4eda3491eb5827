// SPDX-License-Identifier: Apache-2.0
// The parts of Blackwell that Hopper lacks, as device functions: tensor memory, tcgen05.mma and its
// commits, a TMA engine that can be late, the TMEM allocator, and the faults that they raise.
//
// A kernel rewritten for sm_90a appends ENGINE_THREADS threads to each CTA. They call fl_engine:
// four warps are the tensor core, a fifth is the TMA engine. The kernel's own threads call the
// other fl_ functions where the sm_100a kernel has an instruction that Hopper does not know. Work
// travels through rings in global memory, because kernels may use all of the shared memory.
//
// Memory order. A pusher publishes an entry with st.release.gpu and the engine takes it with
// ld.acquire.gpu: whatever the pusher knew is complete (a TMA load it waited for, stores of other
// threads it synchronised with), the engine sees. TMA writes need no further proxy fence, since
// observing their mbarrier makes them visible to the generic proxy. A finished batch is followed by
// a warp barrier and a release by one lane before the mbarrier arrival, which orders the
// accumulators and the operand reads before whatever the waiter does next. Tensor memory is global
// memory accessed with relaxed.gpu, so it is never served from a stale L1 line.
//
// Compiles with NVRTC and nvcc for compute_90a without any header; the pure part at the top also
// compiles for the host, where a test compares it with common/hopper/layouts.py.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef __CUDACC__
#define PURE __device__ __forceinline__
#else
#define PURE static inline
#endif

// ---- What the host and the rewriter share with this file ----------------------------------------

constexpr u32 ENGINE_THREADS = 160;  // 4 MMA warps, 1 TMA warp
constexpr u32 MMA_WARPS = 4;
constexpr u32 POISON = 0x7FC0DEAD;  // tensor memory that was never written
constexpr u32 TMEM_COLUMNS = 512;
constexpr u32 TMEM_BYTES = 262144;
constexpr u32 SLOT_BYTES = TMEM_BYTES + 65536;
constexpr u32 MAX_WAITS = 256;
constexpr u32 MAX_MAIN_THREADS = 864;

constexpr u32 FLAG_EAGER = 1;        // MMAs run as soon as they are queued
constexpr u32 FLAG_UNCOMMITTED = 2;  // MMAs never committed are a fault
constexpr u32 LOG_UNIT = 16;         // bytes; records of the log are whole units
constexpr u32 LOG_HEADER = 4;        // units before the first record

enum FaultCode : u32 {
    TIMEOUT = 1,
    BAD_SMEM_DESCRIPTOR = 2,
    BAD_INSTRUCTION_DESCRIPTOR = 3,
    WRONG_LANE_QUARTER = 4,
    TMEM_OUT_OF_RANGE = 5,
    TMEM_NOT_ALLOCATED = 6,
    POISON_READ = 7,
    TMEM_OVERFLOW = 8,
    TMEM_LEAK = 9,
    BAD_DEALLOC = 10,
    MISALIGNED_SWIZZLE_BASE = 11,
    ALLOC_AFTER_RELINQUISH = 12,
    UNSUPPORTED = 13,
    UNCOMMITTED = 14,
    EARLY_DEALLOC = 15,
    BAD_ALLOC = 16,
    LOG_OVERFLOW = 17,
};
enum WaitKind : u32 {
    WAIT_MBARRIER = 1,
    WAIT_CLUSTER = 2,
    WAIT_QUEUE = 3,
    WAIT_SLOT = 4,
    WAIT_ENGINE = 5,
};
enum PoisonReader : u32 { READ_BY_LOAD = 0, READ_BY_ACCUMULATE = 1, READ_BY_OPERAND_A = 2 };
enum UnsupportedReason : u32 {
    CLUSTER_SIZE = 1,
    MAIN_THREADS = 2,
    PAIR_FROM_WRONG_CTA = 3,
    MIXED_CTA_GROUPS = 4,
    TMA_SHAPE = 5,
    TMEM_A_MN_MAJOR = 6,
};
enum DelayKind : u32 { DELAY_MMA = 0, DELAY_TMA = 1, DELAY_TMEM = 2, DELAY_START = 3 };

struct Control {
    u32 slots, flags, seed, timeout_ms;
    u32 delay_ns[4];
    u64 slot_memory, slot_table, fault;
    u64 log;           // one after the other, the logs of the first log_clusters clusters
    u32 log_clusters;  // 0: nothing is logged
    u32 log_units;     // of each log, its header included
    u32 skip;          // PTX line whose operation is left out, 0: none
    u32 reserved;
};
struct Wait {
    u32 cta, warp, line, barrier, parity, kind;
};
struct Fault {
    u32 claimed, code, line;  // claimed: 1 while the record is being filled, 2 once it is complete
    u32 cta[3], warp, lane;
    u32 values[4];
    u32 waits;
    u32 reserved[3];
    Wait wait[MAX_WAITS];
};
static_assert(sizeof(Control) == 80, "mirrored in common/hopper/engine.py");
static_assert(sizeof(Wait) == 24, "mirrored in common/hopper/engine.py");
static_assert(sizeof(Fault) == 6208, "mirrored in common/hopper/engine.py");

// ---- Descriptors and layouts: pure functions ----------------------------------------------------

// A matrix in shared memory as its 64-bit descriptor says; addresses in bytes of a 256 KiB window.
struct Operand {
    u32 start, leading, stride;  // stride: bytes of the stride dimension
    u32 span_log2;               // log2 of the bytes of a swizzled row: 4 (none), 5, 6, 7
    bool mn_major;
};

PURE u32 span_log2_of(u32 swizzle) {
    return swizzle == 2 ? 7 : swizzle == 4 ? 6 : swizzle == 6 ? 5 : 4;
}

PURE Operand decode_operand(u64 descriptor, bool mn_major) {
    Operand operand;
    u32 low = (u32)descriptor, high = (u32)(descriptor >> 32);
    operand.start = (low & 0x3FFF) << 4;
    operand.leading = (low >> 16 & 0x3FFF) << 4;
    operand.stride = (high & 0x3FFF) << 4;
    operand.span_log2 = span_log2_of(high >> 29);
    operand.mn_major = mn_major;
    return operand;
}

// 0, or the fault that a matrix descriptor deserves.
PURE u32 check_operand(u64 descriptor, bool mn_major) {
    u32 low = (u32)descriptor, high = (u32)(descriptor >> 32);
    u32 swizzle = high >> 29;
    bool constant_is_one = (high >> 14 & 7) == 1;
    u32 must_be_zero = (high >> 17 & 7) | (high >> 20 & 1) | (high >> 21 & 0xFF);
    must_be_zero |= (low >> 14 & 3) | low >> 30;
    if (!constant_is_one || must_be_zero || (swizzle & 1)) return BAD_SMEM_DESCRIPTOR;
    if (swizzle == 0) return 0;
    u32 span = 1u << span_log2_of(swizzle);
    u32 offset = (low & 0x3FFF) << 4 & (span * 8 - 1);  // from the start of the swizzle pattern
    // Legal is an advance inside the first row; K-major it must leave room for 16 elements of K.
    bool inside = mn_major ? offset < span : offset + 32 <= span;
    return inside ? 0 : MISALIGNED_SWIZZLE_BASE;
}

// Byte address of element (row along M or N, k), for 16-bit elements; k in [0, 16).
PURE u32 element_address(const Operand& m, u32 row, u32 k) {
    u32 address = m.start;
    bool swizzled = m.span_log2 > 4;
    if (!m.mn_major) {
        address += ((row & 7) << m.span_log2) + (row >> 3) * m.stride;
        address += swizzled ? k * 2 : (k >> 3) * m.leading + (k & 7) * 2;
    } else {
        u32 block_log2 = m.span_log2 - 1;  // elements along MN that are contiguous
        u32 block = row >> block_log2, inner = row & ((1u << block_log2) - 1);
        address += inner * 2 + ((k & 7) << m.span_log2);
        address += block * (swizzled ? m.leading : m.stride);
        address += (k >> 3) * (swizzled ? m.stride : m.leading);
    }
    u32 mask = (1u << m.span_log2) - 16;  // address bits 4 and up that take bits 7 and up
    return address ^ (address >> 3 & mask);
}

// Fields of the 32-bit instruction descriptor.
struct Instruction {
    u32 m, n;
};

PURE Instruction decode_instruction(u32 descriptor) {
    Instruction instruction;
    instruction.m = (descriptor >> 24 & 31) * 16;
    instruction.n = (descriptor >> 17 & 63) * 8;
    return instruction;
}
PURE bool is_bf16(u32 descriptor) { return (descriptor >> 7 & 7) == 1; }
PURE bool a_is_mn_major(u32 descriptor) { return descriptor >> 15 & 1; }
PURE bool b_is_mn_major(u32 descriptor) { return descriptor >> 16 & 1; }
// Sign bits of two 16-bit elements if the operand is negated: bit 13 for A, 14 for B.
PURE u32 sign_masks(u32 descriptor, u32 bit) { return (descriptor >> bit & 1) * 0x80008000u; }

// 0, or BAD_INSTRUCTION_DESCRIPTOR: what kind::f16 with float32 accumulators does not allow.
PURE u32 check_instruction(u32 descriptor, u32 cta_group) {
    Instruction instruction = decode_instruction(descriptor);
    u32 reserved = descriptor & 0xE080004Fu;  // sparse, saturate, bits 6, 23, 29, shift of .ws
    u32 a_type = descriptor >> 7 & 7, b_type = descriptor >> 10 & 7;
    bool types = (descriptor >> 4 & 3) == 1 && a_type == b_type && a_type <= 1;
    bool m = instruction.m == 128 || instruction.m == (cta_group == 2 ? 256 : 64);
    u32 step = cta_group == 2 ? 16 : 8;
    bool n = instruction.n >= step && instruction.n <= 256 && instruction.n % step == 0;
    return !reserved && types && m && n ? 0 : BAD_INSTRUCTION_DESCRIPTOR;
}

// Two CTAs with M = 128: lanes 0-63 hold the first half of N, lanes 64-127 the second (layout B).
PURE bool splits_columns(u32 m, u32 cta_group) { return cta_group == 2 && m == 128; }

PURE u32 accumulator_columns(const Instruction& instruction, u32 cta_group) {
    return splits_columns(instruction.m, cta_group) ? instruction.n / 2 : instruction.n;
}

// Row of this CTA's part of D that a lane holds; with M = 64 only half of the lanes hold one.
PURE u32 row_of_lane(u32 m, u32 cta_group, u32 lane) {
    if (m == 64) return lane / 32 * 16 + lane % 16;
    return splits_columns(m, cta_group) ? lane % 64 : lane;
}

// Bits of the 32-column units that a range of columns touches.
PURE u32 unit_mask(u32 column, u32 columns) {
    u32 first = column / 32, last = (column + columns - 1) / 32;
    return (u32)((2ull << last) - (1ull << first));
}

#ifdef __CUDACC__

// ---- Loads, stores, fences, time ----------------------------------------------------------------

#define INLINE static __device__ __forceinline__

INLINE u32 load_relaxed(u64 address) {
    u32 value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}
INLINE u32 load_acquire(u64 address) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}
INLINE u64 load_acquire64(u64 address) {
    u64 value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}
INLINE void load4(u64 address, u32 (&value)[4]) {
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value[0]), "=r"(value[1]), "=r"(value[2]), "=r"(value[3])
                 : "l"(address) : "memory");
}
INLINE void store_relaxed(u64 address, u32 value) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(address), "r"(value) : "memory");
}
INLINE void store_release(u64 address, u32 value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(address), "r"(value) : "memory");
}
INLINE void store4(u64 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "l"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
INLINE u32 atomic_add(u64 address, u32 value) {
    u32 old;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(old) : "l"(address), "r"(value) : "memory");
    return old;
}
INLINE u32 atomic_next(u64 address) {  // a ticket: needs no order, so it costs no fence
    u32 old;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(old) : "l"(address) : "memory");
    return old;
}
INLINE void atomic_max(u64 address, u32 value) {
    asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;"
                 :: "l"(address), "r"(value) : "memory");
}
INLINE u32 atomic_swap_if(u64 address, u32 expected, u32 value) {
    u32 old;
    asm volatile("atom.acq_rel.gpu.global.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(old) : "l"(address), "r"(expected), "r"(value) : "memory");
    return old;
}
INLINE void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
INLINE u64 now() {
    u64 time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time) :: "memory");
    return time;
}
INLINE u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
INLINE u32 cluster_size() {
    u32 size;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}
INLINE u32 cluster_address(u32 address, u32 rank) {
    u32 mapped;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}
INLINE void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
}
INLINE u32 linear_cta() {
    return (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
}

// ---- Control block, faults, waits, delays -------------------------------------------------------

// The host replaces this value by the address of a Control block.
extern "C" __device__ u64 fl_control = 0xF1A54C0DE0ADD2E5ull;

INLINE const Control* control() { return (const Control*)fl_control; }

// Fill the fault record, unless another thread was first, and end the kernel.
static __device__ __noinline__ void fail(u32 code, u32 line, u32 a, u32 b, u32 c, u32 d) {
    volatile Fault* fault = (volatile Fault*)control()->fault;
    u32 old;
    asm volatile("atom.acq_rel.sys.global.cas.b32 %0, [%1], 0, 1;"
                 : "=r"(old) : "l"(control()->fault) : "memory");
    if (old == 0) {
        fault->code = code;
        fault->line = line;
        fault->cta[0] = blockIdx.x;
        fault->cta[1] = blockIdx.y;
        fault->cta[2] = blockIdx.z;
        fault->warp = threadIdx.x / 32;
        fault->lane = threadIdx.x % 32;
        fault->values[0] = a;
        fault->values[1] = b;
        fault->values[2] = c;
        fault->values[3] = d;
        asm volatile("fence.acq_rel.sys;" ::: "memory");
        fault->claimed = 2;
        asm volatile("fence.acq_rel.sys;" ::: "memory");
    } else {  // a trap now would end the kernel before the record is complete
        u64 since = now();
        while (fault->claimed != 2 && now() - since < 100000000) __nanosleep(1000);
    }
    asm volatile("trap;");
}

extern "C" __device__ __noinline__ void fl_fault(u32 code, u32 line, u32 a, u32 b, u32 c, u32 d) {
    fail(code, line, a, b, c, d);
}

// Note in the fault record who waits for what, for the report that follows a timeout.
static __device__ __noinline__ void record_wait(u32 line, u32 barrier, u32 parity, u32 kind) {
    volatile Fault* fault = (volatile Fault*)control()->fault;
    u32 index;
    asm volatile("atom.relaxed.sys.global.add.u32 %0, [%1], 1;"
                 : "=r"(index) : "l"((u64)&((Fault*)control()->fault)->waits) : "memory");
    if (index >= MAX_WAITS) return;
    volatile Wait* wait = &fault->wait[index];
    wait->cta = linear_cta();
    wait->warp = threadIdx.x / 32;
    wait->line = line;
    wait->barrier = barrier;
    wait->parity = parity;
    wait->kind = kind;
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

// One wait of the engine's own code: pause() is called after each failed try.
struct Patience {
    u64 since;
    bool recorded;
    __device__ __forceinline__ Patience() : since(now()), recorded(false) {}
    __device__ __forceinline__ void pause(u32 line, u32 barrier, u32 parity, u32 kind) {
        u64 waited = now() - since, limit = control()->timeout_ms * 1000000ull;
        if (waited > limit) fail(TIMEOUT, line, barrier, parity, kind, (u32)(waited / 1000000));
        if (!recorded && waited > limit / 10) {
            record_wait(line, barrier, parity, kind);
            recorded = true;
        }
        __nanosleep(40);
    }
};

INLINE u32 hash(u32 a, u32 b, u32 c, u32 d) {
    u32 h = a * 0x9E3779B1u ^ b * 0x85EBCA77u ^ c * 0xC2B2AE3Du ^ d * 0x27D4EB2Fu;
    h ^= h >> 15;
    h *= 0x2C1B3C6Du;
    h ^= h >> 12;
    h *= 0x297A2D39u;
    return h ^ h >> 15;
}

INLINE bool delays(DelayKind kind) { return control()->seed && control()->delay_ns[kind]; }

// Sleep for a pseudo-random time below the bound of this kind of delay.
static __device__ __noinline__ void delay(u32 kind, u32 warp, u32 counter) {
    u32 bound = control()->delay_ns[kind];
    u32 wanted = hash(control()->seed, linear_cta(), warp, counter * 4 + kind) % (bound + 1);
    for (u64 start = now(); now() - start < wanted;) {
        u32 rest = wanted - (u32)(now() - start);
        __nanosleep(rest < 500000 ? rest / 2 : 250000);
    }
}

// ---- Slots: tensor memory of a CTA, then its rings and counters ---------------------------------

constexpr u32 RING = 256;     // MMAs and commits, 64 bytes each
constexpr u32 TMA_RING = 64;  // loads, 128 bytes each

// Byte offsets in a slot.
constexpr u32 MMA_TAIL = TMEM_BYTES;
constexpr u32 COMMIT_TAIL = TMEM_BYTES + 4;  // index after the last commit in the MMA ring
constexpr u32 TMA_TAIL = TMEM_BYTES + 128;
constexpr u32 TMA_HEAD = TMEM_BYTES + 132;
constexpr u32 PROGRESS = TMEM_BYTES + 256;  // per MMA warp: entries finished
constexpr u32 EXITS = TMEM_BYTES + 384;     // u64: exited threads << 32 | their cluster arrivals
constexpr u32 ARRIVALS = TMEM_BYTES + 392;  // at cluster barriers, in the slot of the leader
constexpr u32 ALLOCATED = TMEM_BYTES + 512;  // bit per 32 columns
constexpr u32 FREED = TMEM_BYTES + 516;      // bit per 32 columns that were in use before
constexpr u32 RELINQUISHED = TMEM_BYTES + 520;
constexpr u32 LAST_ALLOC = TMEM_BYTES + 524;     // columns
constexpr u32 ALLOC_COLUMNS = TMEM_BYTES + 576;  // u32 per 32 columns, at the first of a block
constexpr u32 WAITING = TMEM_BYTES + 768;        // u64 per warp: the wait that was recorded
constexpr u32 TMEM_ACCESSES = TMEM_BYTES + 1024;  // u32 per warp
constexpr u32 PHASES = TMEM_BYTES + 2048;         // u32 per thread: cluster arrivals
constexpr u32 COMMIT_DONE = TMEM_BYTES + 6144;    // u32 per ring entry: warps that reached it
constexpr u32 MMA_ENTRIES = TMEM_BYTES + 8192;
constexpr u32 TMA_ENTRIES = MMA_ENTRIES + RING * 64;
static_assert(TMA_ENTRIES + TMA_RING * 128 <= SLOT_BYTES, "rings fit in the slot");
static_assert(PHASES + 4 * MAX_MAIN_THREADS <= COMMIT_DONE, "a phase for each main thread");

INLINE u64 slot_of_rank(u64 slot, u32 rank) {
    return slot + (u64)((long long)(int)(rank - cluster_rank()) * (long long)SLOT_BYTES);
}
INLINE u64 tmem_cell(u64 slot, u32 column, u32 lane) {
    return slot + (column * 128 + lane) * 4;
}

// Take a free pair of slots for this CTA or cluster.
static __device__ __noinline__ u64 take_pair() {
    const Control* c = control();
    u32 pairs = c->slots / 2, start;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(start));
    for (Patience patience;;) {
        for (u32 i = 0; i < pairs; i++) {
            u32 pair = (start + i) % pairs;
            if (atomic_swap_if(c->slot_table + pair * 4, 0, 1) == 0)
                return c->slot_memory + (u64)pair * 2 * SLOT_BYTES;
        }
        patience.pause(0, pairs, 0, WAIT_SLOT);
    }
}

static __device__ __noinline__ void give_pair_back(u64 slot) {
    u64 pair = (slot - control()->slot_memory) / (2 * SLOT_BYTES);
    store_release(control()->slot_table + pair * 4, 0);
}

// All threads, converged, at the start. Returns the slot of this CTA.
extern "C" __device__ __noinline__ u64 fl_enter(u32 nmain, u32 smem_scratch) {
    u32 rank = cluster_rank(), size = cluster_size(), thread = threadIdx.x;
    if (size > 2) fail(UNSUPPORTED, 0, CLUSTER_SIZE, size, 0, 0);
    if (nmain % 32 || nmain > MAX_MAIN_THREADS) fail(UNSUPPORTED, 0, MAIN_THREADS, nmain, 0, 0);
    cluster_barrier();  // the peer must have started before its shared memory is written
    if (rank == 0 && thread == 0) {
        u64 pair = take_pair();
        for (u32 r = 0; r < size; r++)
            asm volatile("st.shared::cluster.u64 [%0], %1;"
                         :: "r"(cluster_address(smem_scratch, r)), "l"(pair) : "memory");
    }
    __syncwarp();
    cluster_barrier();
    u64 slot;
    asm volatile("ld.shared.u64 %0, [%1];" : "=l"(slot) : "r"(smem_scratch) : "memory");
    slot += (u64)rank * SLOT_BYTES;
    u32 step = (nmain + ENGINE_THREADS) * 16;
    for (u32 at = thread * 16; at < TMEM_BYTES; at += step)
        store4(slot + at, POISON, POISON, POISON, POISON);
    for (u32 at = TMEM_BYTES + thread * 16; at < SLOT_BYTES; at += step)
        store4(slot + at, 0, 0, 0, 0);
    fence();
    cluster_barrier();
    if (thread < nmain && delays(DELAY_START)) {  // CTAs, and warps in a CTA, start apart
        delay(DELAY_START, 0, 0);
        delay(DELAY_START, 1 + thread / 32, 0);
    }
    __syncwarp();
    return slot;
}

// Each main thread before it returns. The count of exited threads lets the engine finish; their
// arrivals let a cluster barrier count them as present from now on, as the hardware does.
extern "C" __device__ __noinline__ void fl_exit(u64 slot) {
    u64 credit = 1ull << 32 | load_relaxed(slot + PHASES + threadIdx.x * 4);
    asm volatile("red.release.gpu.global.add.u64 [%0], %1;"
                 :: "l"(slot + EXITS), "l"(credit) : "memory");
}

// Called after a failed try of a wait that began at `since`.
extern "C" __device__ __noinline__ void fl_wait_failed(u64 slot, u32 barrier, u32 parity, u32 line,
                                                       u32 kind, u64 since) {
    u64 waited = now() - since, limit = control()->timeout_ms * 1000000ull;
    if (waited > limit / 10) {
        u32 active = __activemask(), lane = threadIdx.x % 32;
        volatile u64* recorded = (volatile u64*)(slot + WAITING) + threadIdx.x / 32;
        if (lane == __ffs(active) - 1 && *recorded != since) {
            *recorded = since;
            record_wait(line, barrier, parity, kind);
        }
        if (waited > limit) fail(TIMEOUT, line, barrier, parity, kind, (u32)(waited / 1000000));
    }
    __nanosleep(32);
}

// Software barrier over the main threads of the cluster: the engine's threads would be counted by
// the native one.
extern "C" __device__ __noinline__ void fl_cluster_arrive(u64 slot, u32 nmain, u32 line) {
    u64 phase = slot + PHASES + threadIdx.x * 4;
    store_relaxed(phase, load_relaxed(phase) + 1);
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;"
                 :: "l"(slot_of_rank(slot, 0) + ARRIVALS) : "memory");
}

extern "C" __device__ __noinline__ void fl_cluster_wait(u64 slot, u32 nmain, u32 line) {
    u32 size = cluster_size(), phase = load_relaxed(slot + PHASES + threadIdx.x * 4);
    u64 leader = slot_of_rank(slot, 0);
    for (u64 since = now();;) {
        // Arrivals first: a thread that arrives and exits in between is then missed, not doubled.
        u32 arrived = load_acquire(leader + ARRIVALS);
        for (u32 rank = 0; rank < size; rank++) {
            u64 exits = load_acquire64(slot_of_rank(slot, rank) + EXITS);
            arrived += (u32)(exits >> 32) * phase - (u32)exits;
        }
        if ((int)(arrived - phase * nmain * size) >= 0) break;
        fl_wait_failed(slot, 0, phase & 1, line, WAIT_CLUSTER, since);
    }
    fence();
}

// ---- Tensor memory: access checks and allocation ------------------------------------------------

INLINE void check_columns(u64 slot, u32 line, u32 address, u32 columns) {
    u32 column = address & 0xFFFF;
    if (column + columns > TMEM_COLUMNS || address >> 16 >= 128 || columns == 0)
        fail(TMEM_OUT_OF_RANGE, line, address, columns, 0, 0);
    u32 allocated = load_relaxed(slot + ALLOCATED);
    if (unit_mask(column, columns) & ~allocated)
        fail(TMEM_NOT_ALLOCATED, line, address, columns, allocated, 0);
}

// Whole warp, converged. Returns the global address of the cell that `address` names.
extern "C" __device__ __noinline__ u64 fl_tmem(u64 slot, u32 address, u32 columns, u32 lanes,
                                               u32 line) {
    u32 warp = threadIdx.x / 32, lane = address >> 16;
    check_columns(slot, line, address, columns);
    bool aligned = lanes == 32 ? lane % 32 == 0 : lane % 16 == 0;
    if (lane / 32 != warp % 4 || !aligned) fail(WRONG_LANE_QUARTER, line, address, warp, lanes, 0);
    if (delays(DELAY_TMEM)) {
        u64 counter = slot + TMEM_ACCESSES + warp * 4;
        __syncwarp();
        u32 count = load_relaxed(counter);
        __syncwarp();
        store_relaxed(counter, count + 1);
        delay(DELAY_TMEM, warp, count);
        __syncwarp();
    }
    return tmem_cell(slot, address & 0xFFFF, lane);
}

INLINE void poison_columns(u64 slot, u32 column, u32 columns) {
    u32 lane = threadIdx.x % 32;
    for (u32 i = 0; i < columns; i++)
        store4(tmem_cell(slot, column + i, lane * 4), POISON, POISON, POISON, POISON);
    fence();
}

// First fit. One thread; returns the column.
static __device__ __noinline__ u32 find_columns(u64 slot, u32 columns, u32 line) {
    u32 last = load_relaxed(slot + LAST_ALLOC);
    bool power = columns >= 32 && columns <= TMEM_COLUMNS && (columns & (columns - 1)) == 0;
    if (!power || (last && columns > last)) fail(BAD_ALLOC, line, columns, last, 0, 0);
    if (load_relaxed(slot + RELINQUISHED)) fail(ALLOC_AFTER_RELINQUISH, line, columns, 0, 0, 0);
    store_relaxed(slot + LAST_ALLOC, columns);
    for (u32 used = load_relaxed(slot + ALLOCATED);;) {
        u32 column = 0;
        while (column + columns <= TMEM_COLUMNS && (unit_mask(column, columns) & used))
            column += 32;
        if (column + columns > TMEM_COLUMNS) fail(TMEM_OVERFLOW, line, columns, used, 0, 0);
        u32 old = atomic_swap_if(slot + ALLOCATED, used, used | unit_mask(column, columns));
        if (old == used) return column;
        used = old;
    }
}

// Whole warp, converged.
extern "C" __device__ __noinline__ void fl_alloc(u64 slot, u32 smem_dst, u32 columns, u32 line) {
    u32 lane = threadIdx.x % 32, column = 0;
    __syncwarp();
    if (lane == 0) column = find_columns(slot, columns, line);
    column = __shfl_sync(~0u, column, 0);
    if (unit_mask(column, columns) & load_relaxed(slot + FREED))
        poison_columns(slot, column, columns);  // what an earlier owner left must not pass as data
    if (lane == 0) {
        store_relaxed(slot + ALLOC_COLUMNS + column / 32 * 4, columns);
        asm volatile("st.shared.u32 [%0], %1;" :: "r"(smem_dst), "r"(column) : "memory");
    }
    __syncwarp();
}

extern "C" __device__ __noinline__ void fl_relinquish(u64 slot, u32 line) {
    if (threadIdx.x % 32 == 0) store_relaxed(slot + RELINQUISHED, 1);
    __syncwarp();
}

// ---- The ring of MMAs and commits ---------------------------------------------------------------

constexpr u32 KIND_GROUP = 3;   // bits of cta_group
constexpr u32 KIND_TMEM_A = 4;  // A comes from tensor memory
constexpr u32 KIND_COMMIT = 8;

// One entry; 64 bytes in the ring, whose first word is its index + 1 once it is complete.
struct Entry {
    u32 kind, d, instruction;  // of a commit: d is the barrier
    u64 a, b;
    u32 accumulate, line, mask, leader_index;  // mask and index in the leader's ring: commits
};

INLINE u64 entry_address(u64 slot, u32 index) { return slot + MMA_ENTRIES + index % RING * 64; }

INLINE Entry load_entry(u64 slot, u32 index) {
    u32 x[4], y[4], z[4];
    u64 at = entry_address(slot, index);
    load4(at, x);
    load4(at + 16, y);
    load4(at + 32, z);
    Entry entry = {x[1], x[2], x[3], y[0] | (u64)y[1] << 32, y[2] | (u64)y[3] << 32,
                   z[0], z[1], z[2], z[3]};
    return entry;
}

INLINE void store_entry(u64 slot, u32 index, const Entry& entry) {
    u64 at = entry_address(slot, index);
    store4(at + 16, (u32)entry.a, (u32)(entry.a >> 32), (u32)entry.b, (u32)(entry.b >> 32));
    store4(at + 32, entry.accumulate, entry.line, entry.mask, entry.leader_index);
    store_relaxed(at + 4, entry.kind);
    store_relaxed(at + 8, entry.d);
    store_relaxed(at + 12, entry.instruction);
    store_release(at, index + 1);
}

// Entries that all MMA warps have finished.
INLINE u32 finished(u64 slot) {
    u32 progress[4];
    load4(slot + PROGRESS, progress);
    u32 least = progress[0];
    for (u32 i = 1; i < MMA_WARPS; i++)
        if ((int)(progress[i] - least) < 0) least = progress[i];
    return least;
}

INLINE void wait_for_room(u64 slot, u32 index, u32 line) {
    if (index - finished(slot) < RING) return;
    for (Patience patience; index - finished(slot) >= RING;)
        patience.pause(line, index, 0, WAIT_QUEUE);
}

// Queue an entry; work of a CTA pair goes to the rings of both CTAs.
static __device__ __noinline__ void push(u64 slot, Entry entry) {
    bool pair = (entry.kind & KIND_GROUP) == 2;
    if (pair && (cluster_rank() != 0 || cluster_size() != 2))
        fail(UNSUPPORTED, entry.line, PAIR_FROM_WRONG_CTA, cluster_rank(), cluster_size(), 0);
    u64 peer = slot_of_rank(slot, 1);
    u32 index = atomic_next(slot + MMA_TAIL);
    u32 peer_index = pair ? atomic_next(peer + MMA_TAIL) : 0;
    // Both must have room before either is written: a counter of COMMIT_DONE is used again after
    // RING entries, and by then both CTAs must be done with its last use.
    wait_for_room(slot, index, entry.line);
    if (pair) wait_for_room(peer, peer_index, entry.line);
    entry.leader_index = index;
    store_entry(slot, index, entry);
    if (pair) store_entry(peer, peer_index, entry);
    if (entry.kind & KIND_COMMIT) {
        atomic_max(slot + COMMIT_TAIL, index + 1);
        if (pair) atomic_max(peer + COMMIT_TAIL, peer_index + 1);
    }
}

extern "C" __device__ __noinline__ void fl_push_mma(u64 slot, u32 line, u32 d, u32 idesc, u64 a,
                                                    u64 b, u32 accumulate, u32 kind) {
    Entry entry = {kind, d, idesc, a, b, accumulate, line, 0, 0};
    push(slot, entry);
}

extern "C" __device__ __noinline__ void fl_push_commit(u64 slot, u32 line, u32 barrier, u32 mask,
                                                       u32 cta_group) {
    Entry entry = {KIND_COMMIT | cta_group, barrier, 0, 0, 0, 0, line, mask, 0};
    push(slot, entry);
}

INLINE bool overlap(u32 first, u32 count, u32 other, u32 other_count) {
    return first < other + other_count && other < first + count;
}

// Whole warp: no MMA that is queued or running may use the columns.
static __device__ __noinline__ void check_unused(u64 slot, u32 column, u32 columns, u32 line) {
    u32 tail = load_relaxed(slot + MMA_TAIL);
    for (u32 index = finished(slot) + threadIdx.x % 32; (int)(tail - index) > 0; index += 32) {
        if (load_acquire(entry_address(slot, index)) != index + 1) continue;
        Entry entry = load_entry(slot, index);
        if (entry.kind & KIND_COMMIT) continue;
        Instruction instruction = decode_instruction(entry.instruction);
        u32 width = accumulator_columns(instruction, entry.kind & KIND_GROUP);
        bool used = overlap(column, columns, entry.d & 0xFFFF, width);
        if (entry.kind & KIND_TMEM_A) used |= overlap(column, columns, entry.a & 0xFFFF, 8);
        if (used) fail(EARLY_DEALLOC, line, column, columns, entry.line, 0);
    }
}

// Whole warp, converged.
extern "C" __device__ __noinline__ void fl_dealloc(u64 slot, u32 address, u32 columns, u32 line) {
    __syncwarp();
    u32 unit = address / 32 % 16;
    u32 given = load_relaxed(slot + ALLOC_COLUMNS + unit * 4);
    if (address % 32 || address >= TMEM_COLUMNS || given != columns || columns == 0)
        fail(BAD_DEALLOC, line, address, columns, given, 0);
    check_unused(slot, address, columns, line);
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        store_relaxed(slot + ALLOC_COLUMNS + unit * 4, 0);
        u32 mask = unit_mask(address, columns);
        asm volatile("red.relaxed.gpu.global.or.b32 [%0], %1;"
                     :: "l"(slot + FREED), "r"(mask) : "memory");
        asm volatile("red.release.gpu.global.and.b32 [%0], %1;"
                     :: "l"(slot + ALLOCATED), "r"(~mask) : "memory");
    }
    __syncwarp();
}

// ---- The tensor core ----------------------------------------------------------------------------

// Where one warp works: `lane` is the first of 16 TMEM lanes, `row` the row of A that it holds,
// [n, n + 8 * fragments) rows of B in CTA `b_rank` of the pair, `column` the column of D for n.
struct Tile {
    u32 lane, row, n, fragments, column;
    bool b_is_remote;
};

// MMAs with the same accumulator and instruction, in lanes [first, first + count) of the warp.
struct Batch {
    u64 slot;
    u32 instruction, d, cta_group, first, count, accumulate;
    u32 own_smem, peer_smem;  // shared::cluster addresses of the CTA windows
};

template <bool TRANSPOSE> INLINE void load_matrices(u32 (&r)[4], u32 address) {
    if (TRANSPOSE)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

INLINE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, bool bf16) {
    if (bf16)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                     "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
                     "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// TMEM lane and column of a thread's first word of a 16 x 16 block of A.
INLINE u32 a_lane(const Batch& batch, u32 address, u32 tile_lane) {
    bool half_used = decode_instruction(batch.instruction).m == 64;
    return (half_used ? tile_lane / 32 * 32 + (address >> 16) : tile_lane) + threadIdx.x % 32 / 4;
}
INLINE u32 a_column(u32 address) { return (address & 0xFFFF) + threadIdx.x % 4; }

// Two elements of K in each 32-bit column.
INLINE void load_a_tmem(u32 (&a)[4], const Batch& batch, u32 address, u32 tile_lane) {
    u64 cell = tmem_cell(batch.slot, a_column(address), a_lane(batch, address, tile_lane));
    a[0] = load_relaxed(cell);
    a[1] = load_relaxed(cell + 8 * 4);
    a[2] = load_relaxed(cell + 4 * 512);
    a[3] = load_relaxed(cell + 4 * 512 + 8 * 4);
}

// Apart from the loads, which would have to complete one by one.
INLINE void check_a_tmem(const u32 (&a)[4], const Batch& batch, const Entry& mine, u32 source,
                         u32 tile_lane) {
    bool poisoned = a[0] == POISON || a[1] == POISON || a[2] == POISON || a[3] == POISON;
    if (!__any_sync(~0u, poisoned)) return;
    u32 address = (u32)__shfl_sync(~0u, mine.a, source);
    u32 line = __shfl_sync(~0u, mine.line, source);
    for (u32 i = 0; i < 4; i++) {
        u32 lane = a_lane(batch, address, tile_lane) + i % 2 * 8;
        u32 column = a_column(address) + i / 2 * 4;
        if (a[i] == POISON)
            fail(POISON_READ, line, lane << 16 | column, READ_BY_OPERAND_A, address, 0);
    }
}

INLINE void load_a_smem(u32 (&a)[4], const Batch& batch, u64 descriptor, u32 row) {
    Operand operand = decode_operand(descriptor, a_is_mn_major(batch.instruction));
    u32 matrix = threadIdx.x % 32 / 8, inner = threadIdx.x % 8;
    row += matrix % 2 * 8;
    u32 k = matrix / 2 * 8;
    if (operand.mn_major)
        load_matrices<true>(a, batch.own_smem + element_address(operand, row, k + inner));
    else
        load_matrices<false>(a, batch.own_smem + element_address(operand, row + inner, k));
}

INLINE u32 load_remote_pair(const Operand& operand, u32 base, u32 row, u32 k) {
    if (!operand.mn_major) {
        u32 both;
        asm volatile("ld.shared::cluster.u32 %0, [%1];"
                     : "=r"(both) : "r"(base + element_address(operand, row, k)) : "memory");
        return both;
    }
    u16 low, high;
    asm volatile("ld.shared::cluster.u16 %0, [%1];"
                 : "=h"(low) : "r"(base + element_address(operand, row, k)) : "memory");
    asm volatile("ld.shared::cluster.u16 %0, [%1];"
                 : "=h"(high) : "r"(base + element_address(operand, row, k + 1)) : "memory");
    return low | (u32)high << 16;
}

// Two fragments of B, 8 rows each, from row n on; without a second, the first once more.
INLINE void load_b(u32 (&b)[4], const Batch& batch, const Operand& operand, bool remote, u32 n,
                   bool two) {
    u32 thread = threadIdx.x % 32;
    if (remote) {  // ldmatrix does not reach another CTA
        for (u32 i = 0; i < 4; i++) {
            u32 row = n + (two ? i / 2 * 8 : 0) + thread / 4;
            b[i] = load_remote_pair(operand, batch.peer_smem, row, i % 2 * 8 + thread % 4 * 2);
        }
        return;
    }
    u32 matrix = thread / 8, inner = thread % 8;
    u32 row = n + (two ? matrix / 2 * 8 : 0), k = matrix % 2 * 8;
    if (operand.mn_major)
        load_matrices<true>(b, batch.own_smem + element_address(operand, row, k + inner));
    else
        load_matrices<false>(b, batch.own_smem + element_address(operand, row + inner, k));
}

INLINE void load_accumulators(float (&c)[8][4], const Batch& batch, const Tile& tile, u32 line) {
    u32 lane = tile.lane + threadIdx.x % 32 / 4, column = tile.column + threadIdx.x % 4 * 2;
    u64 cell = tmem_cell(batch.slot, column, lane);
    bool poisoned = false;
#pragma unroll
    for (u32 f = 0; f < 8; f++)
        for (u32 i = 0; i < 4; i++) {
            c[f][i] = 0;
            if (batch.accumulate && f < tile.fragments)
                c[f][i] = __uint_as_float(load_relaxed(cell + f * 4096 + i % 2 * 512 + i / 2 * 32));
        }
#pragma unroll
    for (u32 f = 0; f < 8; f++)
        for (u32 i = 0; i < 4; i++) poisoned |= __float_as_uint(c[f][i]) == POISON;
    if (!poisoned) return;
#pragma unroll
    for (u32 f = 0; f < 8; f++)
        for (u32 i = 0; i < 4; i++)
            if (__float_as_uint(c[f][i]) == POISON)
                fail(POISON_READ, line, (lane + i / 2 * 8) << 16 | (column + f * 8 + i % 2),
                     READ_BY_ACCUMULATE, batch.d, 0);
}

INLINE void store_accumulators(const float (&c)[8][4], const Batch& batch, const Tile& tile) {
    u32 thread = threadIdx.x % 32;
    u64 cell = tmem_cell(batch.slot, tile.column + thread % 4 * 2, tile.lane + thread / 4);
#pragma unroll
    for (u32 f = 0; f < 8; f++)
        for (u32 i = 0; i < 4; i++)
            if (f < tile.fragments)
                store_relaxed(cell + f * 4096 + i % 2 * 512 + i / 2 * 32, __float_as_uint(c[f][i]));
}

INLINE void load_a(u32 (&a)[4], const Batch& batch, const Tile& tile, const Entry& mine,
                   u32 source) {
    u64 descriptor = __shfl_sync(~0u, mine.a, source);
    if (__shfl_sync(~0u, mine.kind, source) & KIND_TMEM_A)
        load_a_tmem(a, batch, (u32)descriptor, tile.lane);
    else
        load_a_smem(a, batch, descriptor, tile.row);
}

// c += A B for one MMA of a batch.
INLINE void multiply_tile(float (&c)[8][4], u32 (&a)[4], const Batch& batch, const Tile& tile,
                          u64 descriptor) {
    Operand operand = decode_operand(descriptor, b_is_mn_major(batch.instruction));
    u32 negate_a = sign_masks(batch.instruction, 13), negate_b = sign_masks(batch.instruction, 14);
    for (u32 j = 0; j < 4; j++) a[j] ^= negate_a;
#pragma unroll
    for (u32 f = 0; f < 8; f += 2) {
        if (f >= tile.fragments) break;
        u32 b[4];
        load_b(b, batch, operand, tile.b_is_remote, tile.n + f * 8, f + 1 < tile.fragments);
        for (u32 j = 0; j < 4; j++) b[j] ^= negate_b;
        multiply(c[f], a, b[0], b[1], is_bf16(batch.instruction));
        multiply(c[f + 1], a, b[2], b[3], is_bf16(batch.instruction));
    }
}

// 16 rows x up to 64 columns of D over all MMAs of the batch, accumulators in registers throughout.
// Arguments by value: through references they would be read again after each asm statement.
static __device__ __noinline__ void run_tile(Batch batch, Tile tile, Entry mine) {
    float c[8][4];
    u32 a[4], next_a[4];
    u32 end = batch.first + batch.count;
    load_accumulators(c, batch, tile, __shfl_sync(~0u, mine.line, batch.first));
    load_a(a, batch, tile, mine, batch.first);
    for (u32 i = batch.first; i < end; i++) {
        if (i + 1 < end) load_a(next_a, batch, tile, mine, i + 1);  // early, to hide its latency
        if (__shfl_sync(~0u, mine.kind, i) & KIND_TMEM_A)
            check_a_tmem(a, batch, mine, i, tile.lane);
        multiply_tile(c, a, batch, tile, __shfl_sync(~0u, mine.b, i));
        for (u32 j = 0; j < 4; j++) a[j] = next_a[j];
    }
    store_accumulators(c, batch, tile);
}

// A warp owns TMEM lanes 32w .. 32w + 31 in every shape, like a sub-partition of the hardware: MMAs
// that touch the same tensor memory are then ordered within a warp.
INLINE void run_batch(const Batch& batch, const Entry& mine, u32 warp) {
    Instruction instruction = decode_instruction(batch.instruction);
    u32 m = instruction.m, halves = batch.cta_group, half_n = instruction.n / halves;
    bool split = splits_columns(m, batch.cta_group);
    for (u32 block = 0; block < 32; block += 16) {
        Tile tile;
        tile.lane = warp * 32 + block;
        if (m == 64 && block != batch.d >> 16) continue;
        tile.row = row_of_lane(m, batch.cta_group, tile.lane);
        for (u32 half = 0; half < halves; half++) {
            if (split && half != tile.lane / 64) continue;
            tile.b_is_remote = halves == 2 && half != cluster_rank();
            for (tile.n = 0; tile.n < half_n; tile.n += 64) {
                u32 fragments = (half_n - tile.n) / 8;
                tile.fragments = fragments < 8 ? fragments : 8;
                tile.column = (batch.d & 0xFFFF) + tile.n + (split ? 0 : half * half_n);
                run_tile(batch, tile, mine);
            }
        }
    }
}

// One lane: everything that can be wrong about an MMA before it runs.
static __device__ __noinline__ void check_mma(u64 slot, Entry entry) {
    u32 group = entry.kind & KIND_GROUP, line = entry.line;
    if (check_instruction(entry.instruction, group))
        fail(BAD_INSTRUCTION_DESCRIPTOR, line, entry.instruction, group, 0, 0);
    Instruction instruction = decode_instruction(entry.instruction);
    check_columns(slot, line, entry.d, accumulator_columns(instruction, group));
    bool a_mn_major = a_is_mn_major(entry.instruction);
    bool b_mn_major = b_is_mn_major(entry.instruction);
    u32 lanes = instruction.m == 64 ? 16 : 0;  // bits that the lane of an address may have
    if (entry.d >> 16 & ~lanes) fail(TMEM_OUT_OF_RANGE, line, entry.d, instruction.n, 0, 0);
    u32 code = check_operand(entry.b, b_mn_major);
    if (code) fail(code, line, (u32)entry.b, (u32)(entry.b >> 32), 1, b_mn_major);
    if (entry.kind & KIND_TMEM_A) {
        check_columns(slot, line, (u32)entry.a, 8);
        if ((u32)entry.a >> 16 & ~lanes) fail(TMEM_OUT_OF_RANGE, line, (u32)entry.a, 8, 0, 0);
        if (a_mn_major) fail(UNSUPPORTED, line, TMEM_A_MN_MAJOR, entry.instruction, 0, 0);
    } else {
        code = check_operand(entry.a, a_mn_major);
        if (code) fail(code, line, (u32)entry.a, (u32)(entry.a >> 32), 0, a_mn_major);
    }
}

INLINE void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];"
                 :: "r"(barrier) : "memory");
}

// The last of the MMA warps to reach a commit arrives, for a pair the last of both CTAs.
static __device__ __noinline__ void run_commit(u64 slot, u32 group, u32 barrier, u32 mask,
                                               u32 leader_index) {
    u64 leader = group == 2 ? slot_of_rank(slot, 0) : slot;
    u64 done = leader + COMMIT_DONE + leader_index % RING * 4;
    if (atomic_add(done, 1) != MMA_WARPS * group - 1) return;
    store_relaxed(done, 0);
    if (mask == 0xFFFFFFFF) {
        arrive(barrier);
        return;
    }
    for (u32 rank = 0; rank < cluster_size(); rank++)
        if (mask >> rank & 1) arrive(cluster_address(barrier, rank));
}

// What an MMA warp remembers between looks at its ring; the same in all lanes.
struct Tensor {
    u64 slot, peer;
    u32 nmain, warp, next;  // next: index of the first entry not taken
    u32 group;              // cta_group of the entries so far
    u32 uncommitted;        // MMAs run since the last commit
    u64 idle_since;
};

INLINE bool all_exited(u64 slot, u64 peer, u32 nmain) {
    return load_acquire64(slot + EXITS) >> 32 >= nmain &&
           load_acquire64(peer + EXITS) >> 32 >= nmain;
}

// Nothing to do: true once nothing can come any more.
static __device__ __noinline__ bool tensor_idle(const Tensor& t) {
    u32 state = 0;
    if (threadIdx.x % 32 == 0) {
        bool exited = all_exited(t.slot, t.peer, t.nmain);  // before the tails: they are final then
        u32 waiting = load_relaxed(t.slot + MMA_TAIL) - t.next;
        bool committed = (int)(load_relaxed(t.slot + COMMIT_TAIL) - t.next) > 0;
        bool eager = control()->flags & FLAG_EAGER;
        if (exited && !committed && (!eager || waiting == 0)) {
            state = 1;
            u32 lost = waiting + t.uncommitted;
            if (lost && (control()->flags & FLAG_UNCOMMITTED)) fail(UNCOMMITTED, 0, lost, 0, 0, 0);
        } else {
            u64 waited = now() - t.idle_since;
            if (waited > control()->timeout_ms * 2000000ull)  // the kernel's own waits come first
                fail(TIMEOUT, 0, 0, 0, WAIT_ENGINE, (u32)(waited / 1000000));
            __nanosleep(40);
        }
    }
    return __shfl_sync(~0u, state, 0);
}

// Number of entries from t.next on that may run now, at most 32.
INLINE u32 ready_entries(const Tensor& t) {
    u32 lane = threadIdx.x % 32, index = t.next + lane;
    u32 limit = 32;
    if (!(control()->flags & FLAG_EAGER)) {
        // Lazy: results appear as late as possible. A ring that fills up must drain all the same.
        int committed = (int)(load_relaxed(t.slot + COMMIT_TAIL) - t.next);
        u32 queued = load_relaxed(t.slot + MMA_TAIL) - t.next;
        if (queued < RING * 3 / 4) limit = committed < 0 ? 0 : committed;
    }
    bool ready = load_acquire(entry_address(t.slot, index)) == index + 1;
    u32 missing = ~__ballot_sync(~0u, ready && lane < limit);
    return missing ? __ffs(missing) - 1 : 32;
}

// Release by one lane: it also covers what the other lanes did before the warp barrier.
INLINE void publish_progress(const Tensor& t, u32 entries) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) store_release(t.slot + PROGRESS + t.warp * 4, t.next + entries);
}

// Run lanes [i, end) of the window, which share an accumulator. `mine` is this lane's entry.
INLINE void run_mmas(Tensor& t, const Entry& mine, u32 i, u32 end) {
    Batch batch;
    batch.slot = t.slot;
    batch.instruction = __shfl_sync(~0u, mine.instruction, i);
    batch.d = __shfl_sync(~0u, mine.d, i);
    batch.cta_group = __shfl_sync(~0u, mine.kind, i) & KIND_GROUP;
    batch.accumulate = __shfl_sync(~0u, mine.accumulate, i);
    batch.first = i;
    batch.count = end - i;
    batch.own_smem = cluster_address(0, cluster_rank());
    batch.peer_smem = batch.cta_group == 2 ? cluster_address(0, cluster_rank() ^ 1) : 0;
    if (delays(DELAY_MMA)) delay(DELAY_MMA, t.warp, t.next + i);
    __syncwarp();
    run_batch(batch, mine, t.warp);
    t.uncommitted += batch.count;
    publish_progress(t, end);
}

// Run the window of `count` entries that starts at t.next.
static __device__ __noinline__ void run_window(Tensor& t, u32 count) {
    u32 lane = threadIdx.x % 32;
    Entry mine = load_entry(t.slot, t.next + (lane < count ? lane : 0));
    bool commit = mine.kind & KIND_COMMIT;
    if (lane < count && !commit) check_mma(t.slot, mine);
    __syncwarp();
    for (u32 i = 0; i < count;) {
        u32 kind = __shfl_sync(~0u, mine.kind, i), d = __shfl_sync(~0u, mine.d, i);
        u32 instruction = __shfl_sync(~0u, mine.instruction, i), group = kind & KIND_GROUP;
        if (t.group && group != t.group)
            fail(UNSUPPORTED, __shfl_sync(~0u, mine.line, i), MIXED_CTA_GROUPS, t.group, group, 0);
        t.group = group;
        if (kind & KIND_COMMIT) {
            u32 mask = __shfl_sync(~0u, mine.mask, i);
            u32 leader_index = __shfl_sync(~0u, mine.leader_index, i);
            if (lane == 0) run_commit(t.slot, group, d, mask, leader_index);
            t.uncommitted = 0;
            publish_progress(t, ++i);
            continue;
        }
        bool same = !commit && mine.d == d && mine.instruction == instruction &&
                    (mine.kind & KIND_GROUP) == group && (lane == i || mine.accumulate);
        u32 others = ~__ballot_sync(~0u, same && lane < count) >> i;
        u32 end = i + (others ? __ffs(others) - 1 : 32 - i);
        run_mmas(t, mine, i, end);
        i = end;
    }
    t.next += count;
}

static __device__ __noinline__ void tensor_core(u64 slot, u32 nmain, u32 warp) {
    u64 peer = cluster_size() == 2 ? slot_of_rank(slot, cluster_rank() ^ 1) : slot;
    Tensor t = {slot, peer, nmain, warp, 0, 0, 0, now()};
    for (;;) {
        u32 count = ready_entries(t);
        __syncwarp();
        if (count) {
            run_window(t, count);
            t.idle_since = now();
        } else if (tensor_idle(t)) {
            break;
        }
    }
}

// ---- The TMA engine -----------------------------------------------------------------------------

constexpr u32 TMA_BULK = 6;
constexpr u32 TMA_SHAPE_MASK = 7;
constexpr u32 TMA_HAS_POLICY = 8;
constexpr u64 EVICT_NORMAL = 0x1000000000000000ull;  // the policy of a load that names none

struct Load {
    u32 line, destination, barrier, shape, bytes;
    u64 source, policy;  // source: tensor map, or global address of a plain bulk copy
    u32 coordinates[5];
};

extern "C" __device__ __noinline__ void fl_push_tma(u64 slot, u32 line, u32 dst, u32 barrier,
                                                    u64 source, u64 policy, u32 shape, u32 bytes,
                                                    u32 c0, u32 c1, u32 c2, u32 c3, u32 c4) {
    u32 index = atomic_next(slot + TMA_TAIL);
    for (Patience patience; index - load_relaxed(slot + TMA_HEAD) >= TMA_RING;)
        patience.pause(line, index, 1, WAIT_QUEUE);
    u64 at = slot + TMA_ENTRIES + index % TMA_RING * 128;
    if (!(shape & TMA_HAS_POLICY)) policy = EVICT_NORMAL;
    store4(at + 16, line, dst, barrier, shape);
    store4(at + 32, (u32)source, (u32)(source >> 32), (u32)policy, (u32)(policy >> 32));
    store4(at + 48, bytes, c0, c1, c2);
    store4(at + 64, c3, c4, 0, 0);
    store_release(at, index + 1);
}

INLINE Load read_load(u64 slot, u32 index) {
    u64 at = slot + TMA_ENTRIES + index % TMA_RING * 128;
    u32 w[4], x[4], y[4], z[4];
    load4(at + 16, w);
    load4(at + 32, x);
    load4(at + 48, y);
    load4(at + 64, z);
    return {w[0], w[1], w[2], w[3], y[0], x[0] | (u64)x[1] << 32, x[2] | (u64)x[3] << 32,
            {y[1], y[2], y[3], z[0], z[1]}};
}

// Bytes that a tensor map's box writes: element size times extents, which the map stores minus one.
INLINE u32 box_bytes(u64 tensor_map) {
    const volatile u64* word = (const volatile u64*)tensor_map;
    u32 type = (u32)(word[1] >> 7) & 15;
    u32 bytes = type == 0 ? 1 : type == 1 || type == 6 || type == 10 ? 2
              : type == 4 || type == 5 || type == 9 ? 8 : 4;
    bytes *= (u32)(word[6] >> 56) + 1;
    u64 rest = word[7];
    for (u32 i = 0; i < 4; i++) bytes *= ((u32)(rest >> 8 * i) & 255) + 1;
    return bytes;
}

#define TENSOR_LOAD(dimensions, coordinates, ...)                                                  \
    asm volatile("cp.async.bulk.tensor." dimensions ".shared::cluster.global.tile"                 \
                 ".mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, " coordinates            \
                 "], [%2], %3;"                                                                    \
                 :: "r"(load.destination), "l"(load.source), "r"(barrier), "l"(load.policy),       \
                 __VA_ARGS__ : "memory")

INLINE void issue_load(const Load& load, u32 barrier) {
    const u32(&c)[5] = load.coordinates;
    switch (load.shape & TMA_SHAPE_MASK) {
        case 1: TENSOR_LOAD("1d", "{%4}", "r"(c[0])); break;
        case 2: TENSOR_LOAD("2d", "{%4, %5}", "r"(c[0]), "r"(c[1])); break;
        case 3: TENSOR_LOAD("3d", "{%4, %5, %6}", "r"(c[0]), "r"(c[1]), "r"(c[2])); break;
        case 4:
            TENSOR_LOAD("4d", "{%4, %5, %6, %7}", "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
            break;
        case 5:
            TENSOR_LOAD("5d", "{%4, %5, %6, %7, %8}", "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]),
                        "r"(c[4]));
            break;
        case TMA_BULK:
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                         ".L2::cache_hint [%0], [%1], %2, [%3], %4;"
                         :: "r"(load.destination), "l"(load.source), "r"(load.bytes),
                         "r"(barrier), "l"(load.policy) : "memory");
            break;
        default: fail(UNSUPPORTED, load.line, TMA_SHAPE, load.shape, 0, 0);
    }
}

// Hopper's TMA completes on a barrier of the destination's CTA only. For a barrier of the peer:
// load on the barrier at the same offset here, wait, then report the bytes to the peer's.
INLINE void load_for_peer(const Load& load) {
    u32 twin = cluster_address(load.barrier, cluster_rank());
    bool bulk = (load.shape & TMA_SHAPE_MASK) == TMA_BULK;
    u32 bytes = bulk ? load.bytes : box_bytes(load.source), complete = 0;
    u64 token;
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 %0, [%1], %2;"
                 : "=l"(token) : "r"(twin), "r"(bytes) : "memory");
    issue_load(load, twin);
    for (Patience patience;;) {
        asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.shared.b64 p, [%1], %2;\n\t"
                     "selp.u32 %0, 1, 0, p;\n\t}"
                     : "=r"(complete) : "r"(twin), "l"(token) : "memory");
        if (complete) break;
        patience.pause(load.line, twin, 0, WAIT_MBARRIER);
    }
    asm volatile("fence.acq_rel.cluster;\n\t"
                 "mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%0], %1;"
                 :: "r"(load.barrier), "r"(bytes) : "memory");
}

static __device__ __noinline__ void tma_engine(u64 slot, u32 nmain) {
    for (u32 index = 0;; index++) {
        u64 at = slot + TMA_ENTRIES + index % TMA_RING * 128;
        for (u64 since = now(); load_acquire(at) != index + 1;) {
            // Exits before the tail: it is final then.
            bool exited = load_acquire64(slot + EXITS) >> 32 >= nmain;
            if (exited && load_relaxed(slot + TMA_TAIL) == index) return;
            u64 waited = now() - since;
            if (waited > control()->timeout_ms * 2000000ull)
                fail(TIMEOUT, 0, 0, 1, WAIT_ENGINE, (u32)(waited / 1000000));
            __nanosleep(20);
        }
        Load load = read_load(slot, index);
        store_release(slot + TMA_HEAD, index + 1);
        if (delays(DELAY_TMA)) delay(DELAY_TMA, 0, index);
        if (cluster_address(load.barrier, cluster_rank()) == load.barrier || cluster_size() == 1)
            issue_load(load, load.barrier);
        else
            load_for_peer(load);
    }
}

// ---- The executed log ---------------------------------------------------------------------------

// Kernels rewritten with the log call these where they synchronise or touch shared or tensor memory.
// A record takes whole units at the place that a counter of its cluster gives it, so that the order
// of records is one in which things happened: an arrival takes its place before it arrives, a wait
// once it has passed. Word 0 of a record: kind | flags << 8 | warp << 16 | rank << 24; word 1: line
// of the sm_100a PTX; word 2: lanes that took part; the rest: see common/hopper/log.py.

// Address of the log of this CTA's cluster, or 0.
extern "C" __device__ __noinline__ u64 fl_log_start(u32 nmain, u32 smem) {
    const Control* c = control();
    u32 size = cluster_size(), cluster = linear_cta() / size;
    if (cluster >= c->log_clusters) return 0;
    u64 log = c->log + (u64)cluster * c->log_units * LOG_UNIT;
    if (threadIdx.x == 0 && cluster_rank() == 0) {
        store_relaxed(log + 4, smem);
        store_relaxed(log + 8, nmain);
        store_relaxed(log + 12, size);
        store_relaxed(log + 16, linear_cta());
    }
    return log;
}

extern "C" __device__ __noinline__ u32 fl_log_skip() { return control()->skip; }

// Lanes that log the same as this one: lanes that come from different statements can be in here at
// the same time.
INLINE u32 alike(u32 line, u32 a) {
    u64 key = (u64)line << 32 | a;
    u32 active = __activemask(), lanes;
    asm volatile("match.any.sync.b64 %0, %1, %2;" : "=r"(lanes) : "l"(key), "r"(active));
    return lanes;
}

// Place of a record of `lanes`, with its first three words written. All lanes get the same address;
// `first` is true in one of them.
INLINE u64 log_record(u64 log, u32 what, u32 line, u32 lanes, u32 units, bool& first) {
    u32 leader = __ffs(lanes) - 1, at = 0;
    first = threadIdx.x % 32 == leader;
    if (first)
        asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;"
                     : "=r"(at) : "l"(log), "r"(units) : "memory");
    at = __shfl_sync(lanes, at, leader);
    if (at + units > control()->log_units - LOG_HEADER)
        fail(LOG_OVERFLOW, line, control()->log_units, 0, 0, 0);
    u64 record = log + (u64)(at + LOG_HEADER) * LOG_UNIT;
    if (first) {
        store_relaxed(record, what | threadIdx.x / 32 << 16 | cluster_rank() << 24);
        store_relaxed(record + 4, line);
        store_relaxed(record + 8, lanes);
    }
    return record;
}

extern "C" __device__ __noinline__ void fl_log(u64 log, u32 what, u32 line, u32 a) {
    if (!log) return;
    bool first;
    u64 record = log_record(log, what, line, alike(line, a), 1, first);
    if (first) store_relaxed(record + 12, a);
}

extern "C" __device__ __noinline__ void fl_log_words(u64 log, u32 what, u32 line, u32 a, u32 b,
                                                     u32 c, u32 d, u32 e) {
    if (!log) return;
    bool first;
    u64 record = log_record(log, what, line, alike(line, a), 2, first);
    if (!first) return;
    store_relaxed(record + 12, a);
    store4(record + 16, b, c, d, e);
}

// Each lane's access to shared memory: its first word of 4 bytes, all ones for a lane without one.
extern "C" __device__ __noinline__ void fl_log_shared(u64 log, u32 what, u32 line, u32 address,
                                                      u32 bytes, u32 lanes) {
    if (!log) return;
    bool first;
    u32 rank = address >> 24, active = alike(line, rank), lane = threadIdx.x % 32;
    u64 record = log_record(log, what, line, active, 5, first);
    if (first) {
        store_relaxed(record + 12, bytes | rank << 16);
        for (u32 i = 0; i < 4; i++) store4(record + 16 + i * 16, ~0u, ~0u, ~0u, ~0u);
    }
    __syncwarp(active);
    u16 word = (u16)((address & 0xFFFFFF) / 4);
    if (lane < lanes)
        asm volatile("st.relaxed.gpu.global.u16 [%0], %1;"
                     :: "l"(record + 16 + lane * 2), "h"(word) : "memory");
    __syncwarp(active);
}

extern "C" __device__ __noinline__ void fl_log_mma(u64 log, u32 what, u32 line, u32 d,
                                                   u32 instruction, u64 a, u64 b, u32 accumulate) {
    if (!log) return;
    bool first;
    u64 record = log_record(log, what, line, alike(line, d), 3, first);
    if (!first) return;
    store_relaxed(record + 12, d);
    store4(record + 16, (u32)a, (u32)(a >> 32), (u32)b, (u32)(b >> 32));
    store4(record + 32, instruction, accumulate, 0, 0);
}

// A bulk copy or reduction; `tensor`: its map, from which its size follows, or 0.
extern "C" __device__ __noinline__ void fl_log_copy(u64 log, u32 what, u32 line, u32 smem,
                                                    u32 other, u64 tensor, u32 bytes, u32 c0,
                                                    u32 c1, u32 c2, u32 c3, u32 c4) {
    if (!log) return;
    bool first;
    u64 record = log_record(log, what, line, alike(line, smem), 3, first);
    if (!first) return;
    store_relaxed(record + 12, smem);
    store4(record + 16, other, tensor ? box_bytes(tensor) : bytes, (u32)tensor, c4);
    store4(record + 32, c0, c1, c2, c3);
}

// ---- The engine ----------------------------------------------------------------------------------

// Threads 0 .. ENGINE_THREADS - 1 of the engine. Returns when the kernel's own threads have called
// fl_exit in this CTA and its peer and the rings are empty; the caller then returns.
extern "C" __device__ __noinline__ void fl_engine(u64 slot, u32 nmain, u32 tid) {
    u32 warp = tid / 32;
    if (warp < MMA_WARPS)
        tensor_core(slot, nmain, warp);
    else if (tid % 32 == 0)
        tma_engine(slot, nmain);
    __syncwarp();
    if (tid == 0) {
        u32 allocated = load_acquire(slot + ALLOCATED);
        if (allocated) fail(TMEM_LEAK, 0, allocated, 0, 0, 0);
    }
    __syncwarp();
    // Native: counts the engines of both CTAs, and main threads because they have exited. No CTA
    // leaves while the other may still read its shared memory or arrive at its barriers.
    cluster_barrier();
    if (tid == 0 && cluster_rank() == 0) give_pair_back(slot);
    __syncwarp();
}

#endif  // __CUDACC__
