// Decode kernels: K and V in e4m3 with a scale per row, queries in f16 or bf16. There is none for a
// head_dim of 256, which would spill up to sm_86, where e4m3 has no conversion instruction; the
// general kernel takes it.
#include "decode.h"
KV_DECODE(decode_e4m3_row_64, KvDecodeRowCodes<KvRowOf<KvCodeE4m3>>, 64)
KV_DECODE(decode_e4m3_row_80, KvDecodeRowCodes<KvRowOf<KvCodeE4m3>>, 80)
KV_DECODE(decode_e4m3_row_96, KvDecodeRowCodes<KvRowOf<KvCodeE4m3>>, 96)
KV_DECODE(decode_e4m3_row_128, KvDecodeRowCodes<KvRowOf<KvCodeE4m3>>, 128)
KV_DECODE(decode_e4m3_row_192, KvDecodeRowCodes<KvRowOf<KvCodeE4m3>>, 192)
