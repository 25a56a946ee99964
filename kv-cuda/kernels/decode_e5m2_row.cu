// Decode kernels: K and V in e5m2 with a scale per row, queries in f16 or bf16.
#include "decode.h"
KV_DECODE(decode_e5m2_row_64, KvDecodeRowCodes<KvRowOf<KvCodeE5m2>>, 64)
KV_DECODE(decode_e5m2_row_80, KvDecodeRowCodes<KvRowOf<KvCodeE5m2>>, 80)
KV_DECODE(decode_e5m2_row_96, KvDecodeRowCodes<KvRowOf<KvCodeE5m2>>, 96)
KV_DECODE(decode_e5m2_row_128, KvDecodeRowCodes<KvRowOf<KvCodeE5m2>>, 128)
KV_DECODE(decode_e5m2_row_192, KvDecodeRowCodes<KvRowOf<KvCodeE5m2>>, 192)
KV_DECODE(decode_e5m2_row_256, KvDecodeRowCodes<KvRowOf<KvCodeE5m2>>, 256)
