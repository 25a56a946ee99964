//! Main loops of kernels in the machine code for `sm_90a`, written by `cargo xtask gate --update`.
//! A stage of `cargo xtask test` compares them with the archive.
use super::predict::Loop;

/// Decode and prefill kernels with a head dim of 128.
#[rustfmt::skip]
pub(super) const LOOPS: &[Loop] = &[
    Loop { kernel: "decode_bf16_128", bytes: 16384, cycles: 2953.8, cycles_alone: 2796.4 },
    Loop { kernel: "decode_f16_128", bytes: 16384, cycles: 3217.3, cycles_alone: 2892.4 },
    Loop { kernel: "decode_e4m3_128", bytes: 8192, cycles: 3189.2, cycles_alone: 2710.2 },
    Loop { kernel: "decode_e5m2_128", bytes: 8192, cycles: 2953.0, cycles_alone: 2642.8 },
    Loop { kernel: "decode_int8_128", bytes: 8192, cycles: 3314.1, cycles_alone: 2823.8 },
    Loop { kernel: "decode_e4m3_row_128", bytes: 8320, cycles: 4593.2, cycles_alone: 3260.8 },
    Loop { kernel: "decode_e5m2_row_128", bytes: 8320, cycles: 4588.4, cycles_alone: 3379.6 },
    Loop { kernel: "decode_int8_row_128", bytes: 8320, cycles: 5269.8, cycles_alone: 3626.0 },
    Loop { kernel: "decode_l4_128", bytes: 4224, cycles: 5128.8, cycles_alone: 3723.4 },
    Loop { kernel: "prefill_bf16_128", bytes: 8192, cycles: 5211.4, cycles_alone: 3819.6 },
    Loop { kernel: "prefill_f16_128", bytes: 8192, cycles: 5210.0, cycles_alone: 3819.6 },
];
