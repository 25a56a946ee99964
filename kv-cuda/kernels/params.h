// Parameters that the host passes to kernels. src/params.rs mirrors them field by field. Addresses
// are device addresses; strides and sizes count bytes.
#pragma once
#include "dev.h"

enum KvAxes : u32 { KV_BSHD = 0, KV_SBHD = 1, KV_THD = 2 };
enum KvDtype : u32 { KV_F32 = 0, KV_F16 = 1, KV_BF16 = 2 };

// Encodings of a stored row: kv-core's `KvFormat::kernel_code`, by name. The host refuses all
// others.
enum KvFormat : u32 {
  KV_FMT_F32 = 0, KV_FMT_F16 = 1, KV_FMT_BF16 = 2,
  KV_FMT_E4M3 = 3, KV_FMT_E4M3_HEAD = 4, KV_FMT_E4M3_ROW = 5,
  KV_FMT_E5M2 = 6, KV_FMT_E5M2_HEAD = 7, KV_FMT_E5M2_ROW = 8,
  KV_FMT_INT8_ROW = 9, KV_FMT_INT8 = 10, KV_FMT_INT8_HEAD = 11,
  KV_FMT_L6 = 12, KV_FMT_L6_G32 = 13, KV_FMT_L4 = 14, KV_FMT_L4_G32 = 15,
  KV_FMT_L3 = 16, KV_FMT_L3_G32 = 17,
  KV_FMT_Q8_0 = 18, KV_FMT_Q4_0 = 19, KV_FMT_NVFP4 = 20,
};

// Rows of a caller's tensor. The heads of a token, and the values of a head, are contiguous.
struct KvTensor {
  u64 data;          // first element; 0 for an absent tensor
  u64 batch_stride;  // between entries of the batch; 0 for thd
  u64 token_stride;  // between tokens of an entry
  u32 axes;          // KvAxes
  u32 dtype;         // KvDtype
  u32 batch;         // capacity in entries; 1 for thd
  u32 tokens;        // capacity in tokens of each entry; of the whole axis for thd
  u32 heads, dim;
};

// The K or the V of one layer, stored in blocks.
struct KvPlane {
  u64 base;                   // first segment
  u64 segments;               // u64 addresses of all segments; 0 if there is only one
  u64 constants;              // kv-core's PlaneConstants in f32; 0 if there are none
  u64 block_bytes;
  u64 token_stride;           // between tokens of a head, inside a block
  u64 head_stride;            // between heads of a token
  u64 wide_head_stride;       // the same between rows that are kept in 16 bits among codes
  u64 mean_begin;             // from a block's start to the f16 mean of its head 0
  u32 blocks_per_segment, num_blocks, block_size, num_kv_heads, head_dim;
  u32 format;                 // KvFormat
  u32 row_bytes, scales_begin;
  u32 transforms;             // rows are transformed before they are stored
  u32 block_means;            // blocks store the mean of their rows
  u32 full_precision_prefix;  // number of first tokens that are kept in 16 bits
  u32 wide_slots;             // slots that a row in 16 bits occupies
  u32 wide_per_block;         // rows in 16 bits that fit a block
  u32 has_tail;
};

// One entry of the batch: kv-core's PlannedSequence, and its block table.
struct KvSequence {
  u32 row, q_start, q_len, new_start, new_len, kv_len;
  u32 coded, coded_before, sealed_index, split_start, num_splits;
  u32 table;  // index of its first block in KvPlan::tables
};

struct KvSplit { u32 sequence, begin, end, pad; };

// Counts of a step, in device memory: a captured graph reads new ones at every replay.
struct KvCounts { u32 sequences, splits, total_q, total_new, q_len_max, new_len_max, pad0, pad1; };

// The plan of a step for one group of layers, in device memory.
struct KvPlan {
  u64 counts;     // KvCounts
  u64 sequences;  // KvSequence
  u64 splits;     // KvSplit, grouped by sequence
  u64 slots;      // u32: first slot of every new token
  u64 tables;     // u32: block tables
};

// A changed entry of the block tables: `tables[at] = block`.
struct KvTableChange { u32 at, block; };
struct KvTableParams {
  u64 changes;  // KvTableChange
  u64 tables;   // u32
  u32 num_changes, pad;
};

struct KvWriteParams { KvPlan plan; KvTensor k, v; KvPlane k_plane, v_plane; };

struct KvAttendParams {
  KvPlan plan;
  KvTensor q, out, lse;  // lse: dim 1, f32, natural logarithm; may be absent
  KvPlane k_plane, v_plane;
  u64 sink_logits;           // f32 per query head; 0 if absent
  u64 partial_rows;          // f32 [splits][queries][heads][dim_v]: see attend.cu
  u64 partial_stats;         // f32 pairs (maximum, sum), indexed like partial_rows
  u64 partial_index;         // u32 per sequence: index of its first partial result
  u64 counters;              // u32, zero before and after every launch
  float scale;
  float soft_cap;            // 0 if absent
  u32 full;                  // a full mask instead of a causal one
  u32 window_left;           // UINT32_MAX if absent
  u32 sink_tokens;           // first tokens that a window always sees
  u32 group;                 // query heads per kv head
  u32 q_len_min, q_len_max;  // entries with fewer or more queries belong to another kernel
};

// A work item of decoding: one KV split of up to 16 query rows of one kv head. See decode_plan.h. It
// carries what attention needs of its entry, so that a kernel need not wait for the entry too. Work
// items of prefill (prefill_plan.h) are the same.
struct KvWorkItem {
  u32 sequence, head;        // entry of the batch, kv head
  u32 row;                   // its first query row; each query has `group` of them
  u32 tile_begin, tile_end;  // tiles of the split, among those that the rows see
  u32 split, num_splits;     // which KV split of the rows this is, and how many there are
  u32 partial;               // index of the rows' first partial result; 0 if there is one split
  u32 kv_len, q_len, q_start, table;  // of its KvSequence
};

// Parameters of `plan_decode`, which distributes the work over `slots` thread blocks.
struct KvDecodePlanParams {
  KvPlan plan;
  u64 items;   // KvWorkItem, aligned to 16 bytes, ordered by slot
  u64 starts;  // u32 [slots + 1]: the first work item of every slot
  u32 slots, kv_heads, group;
  u32 full, window_left, sink_tokens;  // as in KvAttendParams
  u32 invariant;                       // splits depend on positions alone, not on the batch
  u32 q_len_max;                       // entries with more queries belong to another kernel
};

// Parameters of the kernels `decode_*`. Here partial_rows is f32 [partial results][rows][dim],
// partial_stats f32 [partial results][rows] and counters u32 [partial results], where rows is
// q_len_max * group, 16 at most; no entry that is decoded has more than q_len_max queries.
// partial_index is unused.
struct KvDecodeParams {
  KvAttendParams attend;
  u64 items, starts;  // from `plan_decode` or the host, for as many slots as thread blocks
  u32 stages;         // stages of a warp's ring buffer in shared memory: see decode.h
  u32 block_shift;    // block_size is 1 << block_shift; 0 if it is 1 or no power of two
};

struct KvRange { u32 table, begin, len, coded, start, pad0, pad1, pad2; };
struct KvGatherParams {
  KvPlane plane;
  KvTensor out;
  u64 ranges;  // KvRange; `start` is the first ragged row of its output
  u64 tables;  // u32
  u32 num_ranges, total;
};

struct KvBlockCopy { u32 from, to, slots, pad; };
struct KvCopyParams {
  u64 planes;  // KvPlane: all planes
  u64 copies;  // KvBlockCopy
  u32 num_planes, num_copies;
};

struct KvEntry { u32 start, len; };
struct KvConvertParams {
  KvTensor src, dst;
  u64 entries;  // KvEntry
  u32 num_entries, total;
};

// Parameters of `store_q8_0` and `load_q8_0`. Stored rows follow each other without gaps: those of all
// entries in the order of a ragged tensor, each token with its heads.
struct KvStoredParams {
  KvTensor rows;
  u64 stored;
  u64 entries;  // KvEntry
  u32 num_entries, total;
};

// Parameters of `pad_rows`, which fills the rows of an output that belong to no entry.
struct KvPadParams {
  KvTensor out;
  u64 entries;  // KvEntry
  u32 num_entries, total;
  float value;
  u32 pad;
  u64 counts;  // KvCounts that override num_entries and total; 0 if absent
};
