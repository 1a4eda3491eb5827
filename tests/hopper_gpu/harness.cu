// SPDX-License-Identifier: Apache-2.0
// Drives the functions of engine.cu from a kernel of our own. Compiled behind engine.cu in one
// program; harness.py fills a Job, launches, and compares what comes back.

struct Push {
    u32 kind, d, instruction, accumulate;  // kind as in the ring; KIND_COMMIT: commit
    u64 a, b;                              // descriptors relative to the start of dynamic memory
};
struct Job {
    u64 smem[2], tmem[2];          // per CTA: what to start with; tmem may be 0
    u64 out_smem[2], out_tmem[2];  // per CTA: what is there in the end; may be 0
    u64 source;                    // tensor map or global address of a load, 0: none
    u32 smem_bytes, tmem_columns, alloc_columns, pushes;
    u32 shape, bytes, destination, coordinate[2], peer_barrier;
    u32 action, blocks;
    Push push[64];
};
static_assert(sizeof(Push) == 32 && sizeof(Job) == 72 + 48 + 64 * 32, "mirrored in harness.py");

// What goes wrong on purpose.
enum Action : u32 {
    NONE = 0,
    LEAK = 1,
    WRONG_QUARTER = 2,
    COLUMNS_OUT_OF_RANGE = 3,
    SECOND_ALLOC = 4,
    DEALLOC_OTHER_SIZE = 5,
    LATE_ALLOC = 6,
    DEALLOC_EARLY = 7,
    WAIT_FOREVER = 8,
    CLUSTER_WAIT_ALONE = 9,
    EXIT_UNCOMMITTED = 10,
    REUSE_COLUMNS = 11,
};

constexpr u32 MAIN = 128;
extern __shared__ __align__(1024) unsigned char smem[];

INLINE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }
INLINE void main_barrier() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

INLINE bool try_wait(u32 barrier, u32 parity) {
    u32 done;
    asm volatile("{\n\t.reg .pred p;\n\t"
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, p;\n\t}"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    return done;
}
INLINE void wait(u64 slot, u32 barrier, u32 parity, u32 line) {
    for (u64 since = now(); !try_wait(barrier, parity);)
        fl_wait_failed(slot, barrier, parity, line, WAIT_MBARRIER, since);
}

// Main threads: dump or fill [column][lane] words of tensor memory.
INLINE void move_tmem(u64 slot, u64 memory, u32 columns, bool fill) {
    u32* words = (u32*)memory;
    u32 lane = threadIdx.x;
    u64 base = fl_tmem(slot, (lane / 32 * 32) << 16, columns, 32, 20) + lane % 32 * 4;
    for (u32 column = 0; column < columns; column++) {
        if (fill)
            store_relaxed(base + column * 512, words[column * 128 + lane]);
        else
            words[column * 128 + lane] = load_relaxed(base + column * 512);
    }
    fence();
}

INLINE void push_all(u64 slot, const Job* job, u32 smem, u32 barrier) {
    u64 base = (smem & 0x3FFFF) >> 4;
    bool commits = job->action != DEALLOC_EARLY && job->action != EXIT_UNCOMMITTED;
    for (u32 i = 0; i < job->pushes; i++) {
        const Push& p = job->push[i];
        u64 a = p.kind & KIND_TMEM_A ? p.a : p.a + base;
        fl_push_mma(slot, 100 + i, p.d, p.instruction, a, p.b + base, p.accumulate, p.kind);
    }
    u32 group = job->push[0].kind & KIND_GROUP;
    if (job->pushes && commits)
        fl_push_commit(slot, 30, barrier, group == 2 ? 3 : 0xFFFFFFFF, group);
}

INLINE void load(u64 slot, const Job* job, u32 smem, u32 barrier) {
    u32 rank = cluster_rank(), target = job->peer_barrier ? cluster_address(barrier, 0) : barrier;
    u32 bytes = job->bytes * (job->peer_barrier ? 2 : 1);
    if (rank == 0 || !job->peer_barrier)
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                     :: "r"(barrier), "r"(bytes) : "memory");
    fl_push_tma(slot, 40, smem + job->destination, target, job->source, 0, job->shape, job->bytes,
                job->coordinate[0], job->coordinate[1] + rank * 8, 0, 0, 0);
}

INLINE void misbehave(u64 slot, const Job* job, u32 barrier, u32 alloc_word) {
    u32 warp = threadIdx.x / 32;
    if (job->action == WRONG_QUARTER && warp == 1) fl_tmem(slot, 0, 1, 32, 50);
    if (job->action == COLUMNS_OUT_OF_RANGE) fl_tmem(slot, (warp * 32) << 16 | 500, 32, 32, 51);
    if (job->action == SECOND_ALLOC && warp == 0) fl_alloc(slot, alloc_word, 32, 52);
    if (job->action == DEALLOC_OTHER_SIZE && warp == 0) fl_dealloc(slot, 0, 32, 53);
    if (job->action == WAIT_FOREVER) wait(slot, barrier, 1, 54);
    if (job->action == CLUSTER_WAIT_ALONE && warp == 0) {
        fl_cluster_arrive(slot, MAIN, 55);
        fl_cluster_wait(slot, MAIN, 56);
    }
    if (job->action == LATE_ALLOC && warp == 0) {
        fl_relinquish(slot, 57);
        fl_alloc(slot, alloc_word, 32, 58);
    }
    if (job->action == REUSE_COLUMNS && warp == 0) {  // fresh columns must be poisoned again
        fl_dealloc(slot, 0, job->alloc_columns, 59);
        fl_alloc(slot, alloc_word, job->alloc_columns, 60);
    }
}

// All main threads of both CTAs.
INLINE void everybody(u64 slot) {
    fl_cluster_arrive(slot, MAIN, 10);
    fl_cluster_wait(slot, MAIN, 11);
}

INLINE void work(u64 slot, const Job* job) {
    u32 thread = threadIdx.x, rank = cluster_rank(), base = shared_address(smem);
    u32 barrier = base + job->smem_bytes, alloc_word = barrier + 16;
    const u32* image = (const u32*)job->smem[rank];
    for (u32 i = thread; i < job->smem_bytes / 4; i += MAIN) ((u32*)smem)[i] = image[i];
    if (thread == 0) asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(barrier) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async;" ::: "memory");
    if (thread < 32 && job->alloc_columns) fl_alloc(slot, alloc_word, job->alloc_columns, 1);
    main_barrier();
    if (job->tmem[rank]) move_tmem(slot, job->tmem[rank], job->tmem_columns, true);
    everybody(slot);
    if (job->source && thread == 0) load(slot, job, base, barrier);
    bool issuer = rank == 0 || (job->push[0].kind & KIND_GROUP) != 2;
    if (thread == 0 && job->pushes && issuer) push_all(slot, job, base, barrier);
    bool waits = job->action != DEALLOC_EARLY && job->action != EXIT_UNCOMMITTED;
    bool expects = job->pushes || (job->source && (rank == 0 || !job->peer_barrier));
    if (waits && expects) wait(slot, barrier, 0, 12);
    if (job->action == EXIT_UNCOMMITTED)
        for (u64 since = now(); now() - since < 20000000;) __nanosleep(1000);
    main_barrier();
    misbehave(slot, job, barrier, alloc_word);
    everybody(slot);
    if (job->out_tmem[rank]) move_tmem(slot, job->out_tmem[rank], job->alloc_columns, false);
    for (u32 i = thread; job->out_smem[rank] && i < job->smem_bytes / 4; i += MAIN)
        ((u32*)job->out_smem[rank])[i] = ((u32*)smem)[i];
    main_barrier();
    if (thread < 32 && job->alloc_columns && job->action != LEAK)
        fl_dealloc(slot, 0, job->alloc_columns, 13);
    fl_exit(slot);
}

INLINE void whole_kernel(const Job* job) {
    u64 slot = fl_enter(MAIN, shared_address(smem));
    if (threadIdx.x >= MAIN)
        fl_engine(slot, MAIN, threadIdx.x - MAIN);
    else
        work(slot, job);
}

extern "C" __global__ void __launch_bounds__(288, 1) harness(const Job* job) { whole_kernel(job); }

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(288, 1)
harness_pair(const Job* job) {
    whole_kernel(job);
}
