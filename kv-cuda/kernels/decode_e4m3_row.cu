// Decoding: K and V in e4m3 with a scale a row, queries in f16 or bf16. Rows of 256 values are the kernel's for
// everything: up to sm_89, which has no instruction for such codes, they would spill.
#include "decode.h"
KV_DECODE(decode_e4m3_row_64, KvDecodeRowCodes<KvRowOf<KvCodeE4m3>>, 64)
KV_DECODE(decode_e4m3_row_80, KvDecodeRowCodes<KvRowOf<KvCodeE4m3>>, 80)
KV_DECODE(decode_e4m3_row_96, KvDecodeRowCodes<KvRowOf<KvCodeE4m3>>, 96)
KV_DECODE(decode_e4m3_row_128, KvDecodeRowCodes<KvRowOf<KvCodeE4m3>>, 128)
KV_DECODE(decode_e4m3_row_192, KvDecodeRowCodes<KvRowOf<KvCodeE4m3>>, 192)
