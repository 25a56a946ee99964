// Query rows of a work item as A fragments of the mma. Part of decode.h.
#pragma once

template <class F, int DIM> struct KvDecodeQuery {
  // Long rows would need the registers of the output: their fragments are in shared memory, in the
  // order in which lanes read them.
  static constexpr bool IS_SHARED = DIM >= 192 || F::SCALED;
  static constexpr u32 HIGH_BYTES = IS_SHARED ? DIM * 32 : 0, SHARED_BYTES = HIGH_BYTES + (F::SCALED ? DIM * 32 : 0);
  static constexpr u32 STEPS = DIM / 16;

  u32 fragments[IS_SHARED ? 1 : STEPS][4];
  const uint4* shared;
  // For rows with scales: whether queries were transformed. Then the rounding errors of their f16
  // values are multiplied separately, from fragments that follow the others in shared memory.
  bool has_low;

  KV_DEV void get_low(u32 k, u32 lane, u32 (&a)[4]) const {
    const uint4 x = shared[HIGH_BYTES / 16 + k * 32 + lane];
    a[0] = x.x, a[1] = x.y, a[2] = x.z, a[3] = x.w;
  }
  KV_DEV void get(u32 k, u32 lane, u32 (&a)[4]) const {
    if constexpr (IS_SHARED) {
      const uint4 x = shared[k * 32 + lane];
      a[0] = x.x, a[1] = x.y, a[2] = x.z, a[3] = x.w;
    } else {
#pragma unroll
      for (u32 r = 0; r < 4; r++) a[r] = fragments[k][r];
    }
  }

  // Returns the address of a row; null for one without a query.
  static KV_DEV const u16* row_of(const KvDecodeWork& w, u32 own) {
    const KvAttendParams& a = w.p.attend;
    const u32 row = w.item.row + own;
    if (own >= w.rows) return nullptr;
    return (const u16*)kv_head_row(a.q, w.item.sequence, w.sequence.q_start, row / a.group,
                                   w.item.head * a.group + row % a.group);
  }
  // Initialises the state of a lane's rows.
  static KV_DEV void begin_rows(const KvDecodeWork& w, KvDecodeRows& rows) {
    const KvAttendParams& a = w.p.attend;
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      const u32 own = (w.lane >> 2) + h * 8;
      rows.visible[h] = {0, KV_NONE, 0};  // a row without a query masks nothing
      if (own < w.rows) rows.visible[h] = kv_visible(a, w.sequence, (w.item.row + own) / a.group);
      rows.max[h] = kv_minus_inf();
      rows.sum[h] = 0.f;
    }
  }
  // Returns the factor that turns scores into log2 units; with a soft cap, into arguments of its
  // tanh.
  static KV_DEV float factor_of(const KvAttendParams& a, float scale) {
    return a.soft_cap > 0.f ? scale / a.soft_cap : scale * KV_LOG2_E;
  }
  // Finds the power of two that brings values up to `amax` into the range of f16: it scales amax to
  // between 256 and 512, unless amax is almost zero or infinite.
  static KV_DEV void scale_to_f16(float amax, float& shift, float& inverse) {
    const u32 exponent = kv_as_u(amax) >> 23;
    if (exponent < 9 || exponent > 254) return;
    shift = kv_as_f((262 - exponent) << 23);
    inverse = kv_as_f((exponent - 8) << 23);
  }

  // Loads rows of the type of K; zeros for rows without a query.
  KV_DEV void load(const KvDecodeWork& w, KvDecodeRows& rows, u8* smem) {
    const u32 t = w.lane & 3, g = w.lane >> 2;
    begin_rows(w, rows);
    rows.factor[0] = rows.factor[1] = factor_of(w.p.attend, w.p.attend.scale);
    const u16* const from[2] = {row_of(w, g), row_of(w, g + 8)};
    if constexpr (IS_SHARED) {
      shared = (const uint4*)smem;
      for (u32 k = w.warp; k < STEPS; k += KvDecodeRing<F, DIM>::WARPS) {
        u32 x[4];
        step(from, k, t, x);
        ((uint4*)smem)[k * 32 + w.lane] = make_uint4(x[0], x[1], x[2], x[3]);
      }
      kv_sync();
    } else {
      shared = nullptr;
#pragma unroll
      for (u32 k = 0; k < STEPS; k++) step(from, k, t, fragments[k]);
    }
  }
  static KV_DEV void step(const u16* const (&from)[2], u32 k, u32 t, u32 (&x)[4]) {
#pragma unroll
    for (u32 r = 0; r < 4; r++) {
      const u32 h = r & 1;
      x[r] = from[h] == nullptr ? 0 : *(const u32*)(from[h] + F::query_column(k, r, t));
    }
  }

  // Reads a lane's values of a row, of each run of a power of two an eighth: by 16 bytes where all
  // rows are aligned to them.
  template <int BASE> static KV_DEV void read(const u16* row, bool is_aligned, u32 own, u32 (&pairs)[DIM / 16]) {
    constexpr int RUN = kv_decode_run(DIM - BASE), WORDS = RUN / 16, FIRST = BASE / 16;
    const u32* const from = (const u32*)(row + BASE) + own * WORDS;
    if (WORDS % 4 == 0 && is_aligned) {
#pragma unroll
      for (int i = 0; i < WORDS / 4; i++) {
        const uint4 x = kv_ldg((const uint4*)from + i);
        pairs[FIRST + i * 4] = x.x, pairs[FIRST + i * 4 + 1] = x.y;
        pairs[FIRST + i * 4 + 2] = x.z, pairs[FIRST + i * 4 + 3] = x.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < WORDS; i++) pairs[FIRST + i] = kv_ldg(from + i);
    }
    if constexpr (BASE + RUN < DIM) read<BASE + RUN>(row, is_aligned, own, pairs);
  }
  // Returns the column of a lane's value `i`.
  static KV_DEV u32 column(u32 i, u32 own) {
    constexpr u32 whole = kv_decode_run(DIM), rest = DIM - whole;
    return i < whole / 8 ? own * (whole / 8) + i : whole + own * (rest / 8) + i - whole / 8;
  }
  // Writes a lane's values of a row to the fragments at `to`, rounded to f16; with LOW, what the
  // rounding has left.
  template <bool LOW> static KV_DEV void put(u32* to, u32 row, u32 own, const float (&x)[DIM / 8]) {
    to += (row & 7) * 16 + (row >> 3);
#pragma unroll
    for (u32 i = 0; i < DIM / 8; i += 2) {
      u32 pair = kv_pack(KvF16(), x[i], x[i + 1]);
      if constexpr (LOW) {
        pair = kv_pack(KvF16(), x[i] - kv_f16_f((u16)pair), x[i + 1] - kv_f16_f((u16)(pair >> 16)));
      }
      to[F::template query_place<DIM>(column(i, own))] = pair;
    }
  }

  // Loads the rows for codes, which are multiplied in f16: queries of bf16 and those that are
  // transformed are scaled to its range. K rows with scales may be transformed; queries are then
  // transformed too, in f32, and the mean that was subtracted from keys becomes a bias of the scores.
  //
  // Each row is read once, by 8 lanes of one warp, and passed to all warps as fragments. Until the
  // loop begins the last stage of the ring at `ring` is free: warp 0's for fragments, if none are kept
  // in shared memory, and warp 1's for the rows' numbers.
  KV_DEV void load_codes(const KvDecodeWork& w, KvDecodeRows& rows, u8* smem, u8* ring) {
    typedef KvDecodeRing<F, DIM> Ring;
    const KvAttendParams& a = w.p.attend;
    // The shuffles keep the compiler from holding values derived from lane and warp for the whole
    // kernel.
    const u32 lane = kv_shfl(w.lane, w.lane), warp = kv_shfl(w.warp, w.lane), own = lane & 7;
    const bool transform = F::SCALED && a.k_plane.transforms != 0;
    const bool is_aligned = ((a.q.data | a.q.token_stride | a.q.batch_stride) & 15) == 0;
    const KvConstants constants = kv_constants(a.k_plane, w.item.head);
    const float factor = factor_of(a, F::SCALED ? a.scale : a.scale * constants.scale);
    u8* const spare = ring + (w.p.stages - 1) * Ring::STAGE_BYTES;
    u32* const high = (u32*)(SHARED_BYTES > 0 ? smem : spare);
    u32* const low = (u32*)(smem + HIGH_BYTES);
    float2* const numbers = (float2*)(spare + w.p.stages * Ring::STAGE_BYTES);  // 1 / scale and bias of each row
    shared = (const uint4*)smem;
    has_low = transform;
    begin_rows(w, rows);
    float x[DIM / 8];
    u32 row = warp * 4 + (lane >> 3);
#pragma unroll 1
    for (; row < KV_DECODE_ROWS; row += Ring::WARPS * 4) {
      const u16* const from = row_of(w, row);
      u32 pairs[DIM / 16];
#pragma unroll
      for (u32 i = 0; i < DIM / 16; i++) pairs[i] = 0;
      if (from != nullptr) read<0>(from, is_aligned, own, pairs);
      float bias = 0.f, amax = 0.f, shift = 1.f, inverse = 1.f;
#pragma unroll
      for (u32 i = 0; i < DIM / 8; i++) {
        const u16 bits = (u16)(pairs[i / 2] >> i % 2 * 16);
        x[i] = a.q.dtype == KV_F16 ? kv_f16_f(bits) : kv_bf16_f(bits);
      }
      if constexpr (F::SCALED) {
        if (transform) {
#pragma unroll
          for (u32 i = 0; i < DIM / 8; i++) {
            bias += x[i] * constants.mean[column(i, own)];
            x[i] *= constants.back[column(i, own)];
          }
          kv_decode_rotate<DIM, 0>(x, own);
#pragma unroll
          for (u32 mask = 1; mask < 8; mask *= 2) bias += kv_shfl_xorf(bias, mask);
        }
      }
      if (F::SCALED || a.q.dtype == KV_BF16) {
#pragma unroll
        for (u32 i = 0; i < DIM / 8; i++) amax = kv_max(amax, kv_as_f(kv_as_u(x[i]) & 0x7fffffffu));
#pragma unroll
        for (u32 mask = 1; mask < 8; mask *= 2) amax = kv_max(amax, kv_shfl_xorf(amax, mask));
        scale_to_f16(amax, shift, inverse);
      }
#pragma unroll
      for (u32 i = 0; i < DIM / 8; i++) x[i] *= shift;
      put<false>(high, row, own, x);
      if constexpr (F::SCALED && IS_SHARED) put<true>(low, row, own, x);
      if (own == 0) numbers[row] = make_float2(inverse, bias);
    }
    kv_sync();
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      const float2 own_row = numbers[(lane >> 2) + h * 8];
      rows.factor[h] = factor * own_row.x;
      if constexpr (F::SCALED) {
        rows.factor[h] *= F::LEVEL_SCALE;
        rows.bias[h] = factor * own_row.y;
      }
    }
    if constexpr (!IS_SHARED) {
#pragma unroll
      for (u32 k = 0; k < STEPS; k++) {
        const uint4 own_step = ((const uint4*)high)[k * 32 + lane];
        fragments[k][0] = own_step.x, fragments[k][1] = own_step.y;
        fragments[k][2] = own_step.z, fragments[k][3] = own_step.w;
      }
      if constexpr (F::SCALED) {
        kv_sync();  // all fragments have been read
        if (transform) put<true>(low, row - Ring::WARPS * 4, own, x);
      }
    }
    kv_sync();  // before copies to the last stage, and reads of `low`
  }
};
