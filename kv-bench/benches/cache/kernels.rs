//! QK, softmax and PV of a tile of 64 tokens in L1, in cycles of the core, by instruction set,
//! format and number of query rows. `docs/performance.md` compares them with what the ports of a
//! core allow.
use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::measurement::{Measurement, ValueFormatter, WallTime};
use criterion::{BenchmarkId, Criterion, Throughput};
use kv::KvFormat;
use kv_bench::is_smoke;
use kv_cpu_kernels::{
    Isa, Kernels, KeyRows, Logits, OnlineSoftmax, Prefetch, PrefetchTarget, Pv, Qk, RowLayout,
    SCORE_PAD, Softmax, TileRows,
};

const TOKENS: usize = 64;
const HEAD_DIM: u16 = 128;
/// Floats from a row of scores to the next.
const STRIDE: usize = TOKENS + SCORE_PAD;

pub(crate) fn benches() {
    let mut criterion =
        Criterion::default().with_measurement(Cycles::calibrate()).configure_from_args();
    let mut group = criterion.benchmark_group("kernels");
    let (dim, rows): (usize, &[usize]) =
        (HEAD_DIM.into(), if is_smoke() { &[1] } else { &[1, 4, 8] });
    for isa in Isa::available().filter(|isa| *isa != Isa::SCALAR) {
        let Some(kernels) = Kernels::new(isa, PrefetchTarget::None) else { continue };
        for name in ["f32", "f16", "bf16", "int8", "fp8-e4m3", "l4"] {
            let format: KvFormat = name.parse().unwrap();
            let layout = RowLayout::of(format, HEAD_DIM.into()).unwrap().in_pairs();
            // Small values in every format.
            let bytes = vec![0x31; layout.bytes() * TOKENS];
            let run = KeyRows::new(&bytes, layout.bytes(), TOKENS, &layout);
            let (tile, mut decoded) =
                (TileRows::of_run(&run), vec![0.0; kernels.decoded_len(&layout)]);
            for &rows in rows {
                let (q, words) = (vec![0.01; rows * dim], vec![0x3c00_3c00; rows * dim / 2]);
                let words = kernels.takes_words(layout.encoding()).then_some(&*words);
                let (mut scores, mut out) = (vec![0.0; rows * STRIDE], vec![0.0; rows * dim]);
                let (bias, mut states) = (vec![0.0; rows], vec![OnlineSoftmax::EMPTY; rows]);
                let id = |kernel| BenchmarkId::new(format!("{isa}/{name}/{kernel}"), rows);
                group.throughput(Throughput::Elements(u64::try_from(rows * TOKENS * dim).unwrap()));
                group.bench_function(id("qk"), |bencher| {
                    bencher.iter(|| {
                        kernels.qk(&mut Qk {
                            rows,
                            q: &q,
                            words,
                            q_stride: dim,
                            k: tile,
                            scores: &mut scores,
                            score_stride: STRIDE,
                            decoded: &mut decoded,
                            prefetch: &mut Prefetch::none(),
                        });
                    });
                });
                group.bench_function(id("softmax"), |bencher| {
                    bencher.iter(|| {
                        kernels.softmax(&mut Softmax {
                            scores: &mut scores,
                            stride: STRIDE,
                            range: (0, TOKENS),
                            k_scales: None,
                            v_scales: None,
                            bias: &bias,
                            logits: Logits::new(0.088, None, false),
                            states: &mut states,
                            out: &mut out,
                            out_stride: dim,
                        });
                    });
                });
                group.bench_function(id("pv"), |bencher| {
                    bencher.iter(|| {
                        kernels.pv(&mut Pv {
                            rows,
                            weights: &scores,
                            weight_stride: STRIDE,
                            v: tile,
                            out: &mut out,
                            out_stride: dim,
                            decoded: &mut decoded,
                            prefetch: &mut Prefetch::none(),
                        });
                    });
                });
            }
        }
    }
    group.finish();
}

/// Cycles of the core instead of nanoseconds.
struct Cycles {
    per_ns: f64,
}

impl Cycles {
    /// Measures a chain of multiplications, three cycles each on x86-64 and 64-bit Arm cores of the
    /// last ten years, and of an operation of one cycle before each.
    fn calibrate() -> Self {
        const STEPS: u32 = 100_000;
        let ns = (0..50).map(|_| {
            let begin = Instant::now();
            let first = black_box(0x9E37_79B9_7F4A_7C15);
            black_box((0..STEPS).fold(first, |x: u64, _| x.wrapping_mul(x | 1)));
            WallTime.to_f64(&begin.elapsed())
        });
        Self { per_ns: 4.0 * f64::from(STEPS) / ns.fold(f64::INFINITY, f64::min) }
    }
}

impl Measurement for Cycles {
    type Intermediate = Instant;
    type Value = Duration;
    fn start(&self) -> Instant {
        WallTime.start()
    }
    fn end(&self, begin: Instant) -> Duration {
        WallTime.end(begin)
    }
    fn add(&self, a: &Duration, b: &Duration) -> Duration {
        WallTime.add(a, b)
    }
    fn zero(&self) -> Duration {
        WallTime.zero()
    }
    fn to_f64(&self, value: &Duration) -> f64 {
        WallTime.to_f64(value)
    }
    fn formatter(&self) -> &dyn ValueFormatter {
        self
    }
}

impl ValueFormatter for Cycles {
    fn scale_values(&self, _: f64, values: &mut [f64]) -> &'static str {
        for value in values {
            *value *= self.per_ns;
        }
        "cycles"
    }
    fn scale_throughputs(
        &self,
        _: f64,
        throughput: &Throughput,
        values: &mut [f64],
    ) -> &'static str {
        if let Throughput::Elements(products) = throughput {
            let products = f64::from(u32::try_from(*products).unwrap());
            for value in values {
                *value = products / (*value * self.per_ns);
            }
        }
        "products/cycle"
    }
    fn scale_for_machines(&self, values: &mut [f64]) -> &'static str {
        self.scale_values(0.0, values)
    }
}
