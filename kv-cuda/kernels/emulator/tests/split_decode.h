// Parameters of the test kernel of split_decode.cu.
#pragma once
#include "../../dev.h"

constexpr u32 KV_DECODE_DIM = 64, KV_DECODE_WARPS = 4;
constexpr u32 KV_DECODE_SHARED_BYTES = KV_DECODE_WARPS * 3 * 2 * 16 * KV_DECODE_DIM * 2;

// Mistakes that it can make.
enum KvDecodeMistake : u32 {
  KV_RIGHT = 0,
  KV_NO_SYNCWARP = 1,      // a lane reads before another lane's copy has completed
  KV_WAIT_OFF_BY_ONE = 2,  // waits for one group of copies too few
  KV_NO_SYNC = 3,          // shared memory is reused while a warp still reads it
  KV_UNCLAMPED_BLOCK = 4,  // looks up tokens past the end in the block table
  KV_NO_FLAG_SYNC = 5,     // reads the last block's flag before it is written
  KV_DIVERGENT_LANES = 6,  // not all lanes shuffle
  KV_NUM_MISTAKES = 7,
};

// Tokens begin..end of one head of an entry. The KV splits of a head are consecutive blocks.
struct KvWork { u32 entry, head, begin, end, first_part, num_parts; };

struct KvDecodeParams {
  u64 q;         // f16 [entries][heads * group][dim]
  u64 k, v;      // f16 [blocks][block_size][heads][dim]
  u64 tables;    // u32 [entries][table_stride]
  u64 work;      // KvWork of each block of the grid
  u64 parts;     // f32 [grid][group][dim][3]
  u64 out;       // f32 [entries][heads * group][dim]
  u64 counters;  // u32 [entries][heads]: zero before and after
  u32 table_stride, block_size, heads, group;
  float scale;   // of a score in powers of two
  u32 mistake;   // KvDecodeMistake
};
