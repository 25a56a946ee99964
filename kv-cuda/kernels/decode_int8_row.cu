// Decode kernels: K and V in int8 with a scale per row, queries in f16 or bf16.
#include "decode.h"
KV_DECODE(decode_int8_row_64, KvDecodeRowCodes<KvRowOf<KvCodeInt8>>, 64)
KV_DECODE(decode_int8_row_80, KvDecodeRowCodes<KvRowOf<KvCodeInt8>>, 80)
KV_DECODE(decode_int8_row_96, KvDecodeRowCodes<KvRowOf<KvCodeInt8>>, 96)
KV_DECODE(decode_int8_row_128, KvDecodeRowCodes<KvRowOf<KvCodeInt8>>, 128)
KV_DECODE(decode_int8_row_192, KvDecodeRowCodes<KvRowOf<KvCodeInt8>>, 192)
KV_DECODE(decode_int8_row_256, KvDecodeRowCodes<KvRowOf<KvCodeInt8>>, 256)
