// What the host passes to kernels. Mirrored field by field in src/params.rs; addresses are those of
// the device, strides and sizes count bytes.
#pragma once
#include "dev.h"

enum KvAxes : u32 { KV_BSHD = 0, KV_SBHD = 1, KV_THD = 2 };
enum KvDtype : u32 { KV_F32 = 0, KV_F16 = 1, KV_BF16 = 2 };

// Encodings of a row: kv-core's `KvFormat::kernel_constant`, by name. The host refuses all others.
enum KvFormat : u32 {
  KV_FMT_F32 = 0, KV_FMT_F16 = 1, KV_FMT_BF16 = 2,
  KV_FMT_E4M3 = 3, KV_FMT_E4M3_HEAD = 4, KV_FMT_E4M3_ROW = 5,
  KV_FMT_E5M2 = 6, KV_FMT_E5M2_HEAD = 7, KV_FMT_E5M2_ROW = 8,
  KV_FMT_INT8_ROW = 9, KV_FMT_INT8 = 10, KV_FMT_INT8_HEAD = 11,
  KV_FMT_L6 = 12, KV_FMT_L6_G32 = 13, KV_FMT_L4 = 14, KV_FMT_L4_G32 = 15,
  KV_FMT_L3 = 16, KV_FMT_L3_G32 = 17,
  KV_FMT_Q8_0 = 18, KV_FMT_Q4_0 = 19, KV_FMT_NVFP4 = 20,
};

// Rows of tokens in a caller's tensor; the heads of a token and their values lie densely.
struct KvTensor {
  u64 data;          // first element; 0 for a tensor that is not there
  u64 batch_stride;  // from an entry to the next; 0 for thd
  u64 token_stride;  // from a token to the next of its entry
  u32 axes;          // KvAxes
  u32 dtype;         // KvDtype
  u32 batch;         // entries there is room for; 1 for thd
  u32 tokens;        // tokens of each entry there is room for; the whole axis for thd
  u32 heads, dim;
};

// The K or the V of one layer.
struct KvPlane {
  u64 base;              // first segment
  u64 segments;          // u64 addresses of all segments; 0 where there is one
  u64 constants;         // kv-core's PlaneConstants: f32; 0 where there are none
  u64 block_bytes;
  u64 token_stride;      // from a token to the next of its head, inside a block
  u64 head_stride;       // from a head to the next of its token
  u64 wide_head_stride;  // the same in a row kept in 16 bits among codes
  u64 mean_begin;        // from a block's start to the mean of its head 0; f16
  u32 blocks_per_segment, num_blocks, block_size, num_kv_heads, head_dim;
  u32 format;            // KvFormat
  u32 row_bytes, scales_begin;
  u32 transforms;        // rows are transformed before they are stored
  u32 block_means;       // blocks have means of their own
  u32 sinks;             // first tokens, kept in 16 bits
  u32 wide_slots;        // slots of such a row
  u32 wide_per_block;    // such rows in a block
  u32 has_tail;
};

// One entry of the batch: kv-core's PlannedSequence, and where its block table begins.
struct KvSequence {
  u32 row, q_start, q_len, new_start, new_len, kv_len;
  u32 coded, coded_before, sealed_index, split_start, num_splits;
  u32 table;  // index of its first block in KvPlan::tables
};

struct KvSplit { u32 sequence, begin, end, pad; };

// Counts of the step, in device memory: a captured graph meets other counts at every replay.
struct KvCounts { u32 sequences, splits, total_q, total_new, q_len_max, new_len_max, pad0, pad1; };

// The plan of a step for one group of layers, in device memory.
struct KvPlan {
  u64 counts;     // KvCounts
  u64 sequences;  // KvSequence
  u64 splits;     // KvSplit, sequence by sequence
  u64 slots;      // u32: first slot of every new token
  u64 tables;     // u32: block tables
};

// One entry of the block tables that is not as it should be.
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
  u64 sink_logits;       // f32 of every query head; 0 without
  u64 part_rows;         // f32 [splits][queries][heads][dim_v]: see attend.cu
  u64 part_stats;        // f32 pairs beside them
  u64 part_index;        // u32 of every sequence: its first partial result
  u64 counters;          // u32, zero before and after every launch
  float scale;
  float soft_cap;        // 0 without
  u32 full;              // every key is seen, not only those before
  u32 window_left;       // UINT32_MAX without
  u32 sink_tokens;       // seen besides a window
  u32 group;             // query heads of a kv head
  u32 q_len_min, q_len_max;  // entries with fewer or more queries are another kernel's
};

// A piece of decoding: some tiles of what up to 16 query rows of one kv head see. See pieces.h.
struct KvPiece {
  u32 sequence, head;         // entry of the batch, kv head
  u32 row;                    // first of its rows; a query has `group` of them
  u32 tile_begin, tile_end;   // of the tiles that these rows see
  u32 part, parts;            // of the pieces that these rows were cut into
  u32 partial;                // where the partial results of these parts begin; 0 where there is one
};

// Of `plan_decode`, which cuts the work of `slots` thread blocks.
struct KvDecodePlanParams {
  KvPlan plan;
  u64 pieces;  // KvPiece on 16 bytes, in the order of slots
  u64 starts;  // u32 [slots + 1]: the first piece of every slot
  u32 slots, kv_heads, group;
  u32 full, window_left, sink_tokens;  // as in KvAttendParams
  u32 invariant;                       // the cut depends on positions alone
  u32 q_len_max;                       // entries with more queries are another kernel's
};

// Of the kernels `decode_*`. part_rows is f32 [partial results][16][dim], part_stats f32 [partial results][16],
// counters u32 [partial results]; part_index is not used.
struct KvDecodeParams {
  KvAttendParams attend;
  u64 pieces, starts;  // what `plan_decode` or the host wrote for as many slots as there are thread blocks
  u32 units;           // of the ring in shared memory: see decode.h
  u32 block_shift;     // block_size is 1 << block_shift; 0 where it is no such power of two, or 1
};

struct KvRange { u32 table, begin, len, coded, start, pad0, pad1, pad2; };
struct KvGatherParams {
  KvPlane plane;
  KvTensor out;
  u64 ranges;  // KvRange; `start`: first ragged row of its output
  u64 tables;  // u32
  u32 num_ranges, total;
};

struct KvBlockCopy { u32 from, to, slots, pad; };
struct KvCopyParams {
  u64 planes;  // KvPlane, all that there are
  u64 copies;  // KvBlockCopy
  u32 num_planes, num_copies;
};

struct KvEntry { u32 start, len; };
struct KvConvertParams {
  KvTensor src, dst;
  u64 entries;  // KvEntry
  u32 num_entries, total;
};

// Rows of an output that no entry owns.
struct KvPadParams {
  KvTensor out;
  u64 entries;  // KvEntry
  u32 num_entries, total;
  float value;
  u32 pad;
  u64 counts;  // KvCounts whose `sequences` and `total_q` go before the two above; 0 without
};
