//! The backend as a whole, with every kernel table this CPU runs and the emulated one, against a
//! plain reference in `f64`. Seeds are fixed.
#![expect(
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::float_cmp,
    reason = "tests: numbers are small, and zeros are exact"
)]
mod attend;
mod decode;
mod errors;
mod fixture;
mod host_memory;
mod masked;
mod moves;
mod stored;
mod threads;

use kv_core::{DType, KvFormat};
use kv_cpu_kernels::Kernels;

use crate::{CpuBackend, CpuOptions, Isa};

/// A seeded generator (splitmix64).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    pub(crate) fn below(&mut self, n: u32) -> u32 {
        (self.bits() % u64::from(n)) as u32
    }
    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u32) as usize]
    }
    /// Between -1 and 1.
    pub(crate) fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
    /// Half of the time one of the formats that are stored as they come.
    fn format(&mut self) -> KvFormat {
        let all: Vec<_> = KvFormat::all().collect();
        if self.below(2) == 0 { self.pick(&FORMATS) } else { self.pick(&all) }
    }
    pub(crate) fn units(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.unit()).collect()
    }
}

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];
const FORMATS: [KvFormat; 3] = [KvFormat::F32, KvFormat::F16, KvFormat::Bf16];

/// Every way to compute that this machine has.
fn backends() -> Vec<(String, CpuBackend)> {
    let open =
        |isa, threads| CpuBackend::open(CpuOptions::default().with_isa(isa).with_threads(threads));
    let mut list = Vec::new();
    for isa in Isa::available() {
        list.push((isa.to_string(), open(isa, 1).unwrap()));
    }
    for kernels in [Kernels::emulated(), Kernels::emulated_amx()] {
        let emulated = open(Isa::SCALAR, 1).unwrap().with_kernels(kernels);
        list.push((kernels.isa().to_string(), emulated));
    }
    let threads = open(Isa::detect(), 3).unwrap();
    list.push((format!("{} on 3 threads", Isa::detect()), threads));
    list
}
