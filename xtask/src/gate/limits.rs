//! The limits of the gate, each with its reason.
use super::family::{Family, Plain, Shape};
use super::figures::Figures;
use super::pipes::Class;

/// What a limit is about.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Metric {
    /// Bytes of the main loop's code, at most.
    Code(u32),
    /// The compute side of a trip over the time that an H200's memory needs for its bytes, at most.
    OfMemory(f64),
    /// The part of a trip in which the tensor pipe is busy, at least.
    OfTensor(f64),
    /// Cycles of 64 query rows and 64 tokens over those of `prefill_bf16`, at most.
    OfBf16(f64),
    /// The classes of instructions that a trip may have.
    Classes(&'static [Class]),
    /// Bytes of static shared memory, at most.
    Shared(u32),
}

/// A limit for kernels of some families and head dims.
struct Limit {
    /// Names of kernels without the head dim.
    families: &'static [&'static str],
    head_dims: &'static [u32],
    metric: Metric,
    why: &'static str,
}

const PLAIN: &[&str] = &["decode_bf16", "decode_f16"];
const CODES: &[&str] = &["decode_e4m3", "decode_e5m2", "decode_int8"];
const ROWS: &[&str] = &["decode_e4m3_row", "decode_e5m2_row", "decode_int8_row"];
const L4: &[&str] = &["decode_l4"];
const PREFILL_PLAIN: &[&str] = &["prefill_bf16", "prefill_f16"];
const STAGED_CODES: &[&str] = &["prefill_codes"];
const STAGED_ROWS: &[&str] = &["prefill_rows", "prefill_l4"];
const PREFILL_CODED: &[&str] = &["prefill_coded"];
const STAGED_DIMS: &[u32] = &[64, 128];
const ALL: &[u32] = &[64, 80, 96, 128, 192, 256];

const fn limit(
    families: &'static [&'static str],
    head_dims: &'static [u32],
    metric: Metric,
    why: &'static str,
) -> Limit {
    Limit { families, head_dims, metric, why }
}

const CACHED: &str = "loops of at most 16 KB have shown no wait for instructions";
const UNCACHED: &str =
    "the sizes for which an H200 has shown 4 to 5 % of stalls without instruction";
const MEMORY_BOUND: &str = "memory decides: 1.03 of the driver's copy was measured at 0.37";
const NEAR_MEMORY: &str = "near the memory's time: 0.91 of copy was measured at 0.80";
const NARROW: &str = "short rows: the softmax, equal for all head dims, is most of the trip";
const ONE_WARP: &str = "one warp a scheduler: its own latencies are not covered";
const SCALED: &str = "scales of rows: near the memory's time; 0.56 of copy was measured at 1.30";
const FOUR_BITS: &str = "compute-bound: saves memory and not time, 0.28 of copy at 2.50";
const ONE_MATRIX: &str = "one matrix of rows a warp: fragments of K and V are loaded for it alone";
const DECODED: &str = "codes are decoded once for 128 rows, beside products that bf16 has too";
const SHORT_TILES: &str = "tiles of 32 tokens: registers hold no more beside codes";
const TENSOR: &str = "products decide: 351 TFLOP/s were measured at 0.65";
const SYSTEM: &str = "the system's own; more would take shared memory from the stages";
const LOCAL: &str = "no spills, atomics or stores in a loop, and no other kind of product";

const ARGUMENT: &str = "local memory only for the argument of the function that decodes a tile";

const OF_LOOPS: &[Class] = &[
    Class::Hmma,
    Class::Ldsm,
    Class::Lds,
    Class::Ldgsts,
    Class::Ldg,
    Class::Shfl,
    Class::Mufu,
    Class::F2fp,
    Class::Float,
    Class::Int,
    Class::Control,
];

const OF_STAGED: &[Class] = &[
    Class::Hmma,
    Class::Ldsm,
    Class::Lds,
    Class::Sts,
    Class::Ldgsts,
    Class::Ldg,
    Class::Shfl,
    Class::Mufu,
    Class::F2fp,
    Class::Float,
    Class::Int,
    Class::Control,
];

const OF_CODED: &[Class] = &[
    Class::Hmma,
    Class::Ldsm,
    Class::Lds,
    Class::Ldg,
    Class::Local,
    Class::Shfl,
    Class::Mufu,
    Class::F2fp,
    Class::Float,
    Class::Int,
    Class::Control,
];

/// The limits: above the figures of the kernels by as much as a new compiler may change them.
const LIMITS: &[Limit] = &[
    limit(PLAIN, ALL, Metric::Code(16_384), CACHED),
    limit(CODES, &[64, 80, 96, 128], Metric::Code(16_384), CACHED),
    limit(CODES, &[192, 256], Metric::Code(21_504), UNCACHED),
    limit(ROWS, &[64, 80, 96, 128], Metric::Code(16_384), CACHED),
    limit(ROWS, &[192, 256], Metric::Code(19_456), UNCACHED),
    limit(L4, &[64, 96, 128], Metric::Code(16_384), CACHED),
    limit(L4, &[192, 256], Metric::Code(26_624), UNCACHED),
    limit(PREFILL_PLAIN, ALL, Metric::Code(16_384), CACHED),
    limit(STAGED_CODES, STAGED_DIMS, Metric::Code(16_384), CACHED),
    limit(STAGED_ROWS, &[64], Metric::Code(17_408), UNCACHED),
    limit(STAGED_ROWS, &[128], Metric::Code(16_384), CACHED),
    limit(PREFILL_CODED, ALL, Metric::Code(16_384), CACHED),
    limit(PLAIN, &[64, 80, 96], Metric::OfMemory(0.75), NARROW),
    limit(PLAIN, &[128], Metric::OfMemory(0.50), MEMORY_BOUND),
    limit(PLAIN, &[192, 256], Metric::OfMemory(0.80), ONE_WARP),
    limit(CODES, &[64, 80, 96], Metric::OfMemory(1.35), NARROW),
    limit(CODES, &[128], Metric::OfMemory(0.95), NEAR_MEMORY),
    limit(CODES, &[192, 256], Metric::OfMemory(1.25), ONE_WARP),
    limit(ROWS, &[64, 80, 96], Metric::OfMemory(1.45), NARROW),
    limit(ROWS, &[128], Metric::OfMemory(1.05), SCALED),
    limit(ROWS, &[192, 256], Metric::OfMemory(1.55), ONE_WARP),
    limit(L4, &[64, 96], Metric::OfMemory(3.15), NARROW),
    limit(L4, &[128], Metric::OfMemory(2.20), FOUR_BITS),
    limit(L4, &[192, 256], Metric::OfMemory(3.55), ONE_WARP),
    limit(PREFILL_PLAIN, &[64], Metric::OfTensor(0.42), NARROW),
    limit(PREFILL_PLAIN, &[80, 96, 128], Metric::OfTensor(0.52), TENSOR),
    limit(PREFILL_PLAIN, &[192, 256], Metric::OfTensor(0.35), ONE_MATRIX),
    limit(STAGED_CODES, &[64], Metric::OfBf16(1.20), DECODED),
    limit(STAGED_CODES, &[128], Metric::OfBf16(1.60), SHORT_TILES),
    limit(STAGED_ROWS, &[64], Metric::OfBf16(1.60), DECODED),
    limit(STAGED_ROWS, &[128], Metric::OfBf16(1.75), SHORT_TILES),
    limit(PREFILL_CODED, ALL, Metric::OfTensor(0.27), ONE_MATRIX),
    limit(PLAIN, ALL, Metric::Classes(OF_LOOPS), LOCAL),
    limit(CODES, ALL, Metric::Classes(OF_LOOPS), LOCAL),
    limit(ROWS, ALL, Metric::Classes(OF_LOOPS), LOCAL),
    limit(L4, ALL, Metric::Classes(OF_LOOPS), LOCAL),
    limit(PREFILL_PLAIN, ALL, Metric::Classes(OF_LOOPS), LOCAL),
    limit(STAGED_CODES, STAGED_DIMS, Metric::Classes(OF_STAGED), LOCAL),
    limit(STAGED_ROWS, STAGED_DIMS, Metric::Classes(OF_STAGED), LOCAL),
    limit(PREFILL_CODED, ALL, Metric::Classes(OF_CODED), ARGUMENT),
    limit(PLAIN, ALL, Metric::Shared(1024), SYSTEM),
    limit(CODES, ALL, Metric::Shared(1024), SYSTEM),
    limit(ROWS, ALL, Metric::Shared(1024), SYSTEM),
    limit(L4, ALL, Metric::Shared(1024), SYSTEM),
    limit(PREFILL_PLAIN, ALL, Metric::Shared(1024), SYSTEM),
    limit(STAGED_CODES, STAGED_DIMS, Metric::Shared(1024), SYSTEM),
    limit(STAGED_ROWS, STAGED_DIMS, Metric::Shared(1024), SYSTEM),
    limit(PREFILL_CODED, ALL, Metric::Shared(1024), SYSTEM),
];

impl Limit {
    fn is_for(&self, shape: &Shape) -> bool {
        let family = shape.family.to_string();
        self.families.contains(&family.as_str()) && self.head_dims.contains(&shape.head_dim)
    }

    /// Returns what is wrong with a kernel, beside all others.
    fn problem(&self, one: &Figures, all: &[Figures]) -> Option<String> {
        let wrong = match self.metric {
            Metric::Code(most) if one.code_bytes > most => {
                format!("{} bytes of code in the loop, at most {most}", one.code_bytes)
            }
            Metric::OfMemory(most) if one.of_memory() > most => {
                format!("{:.2} of the memory's time, at most {most:.2}", one.of_memory())
            }
            Metric::OfTensor(least) if one.of_tensor() < least => {
                format!("the tensor pipe is busy {:.2}, at least {least:.2}", one.of_tensor())
            }
            Metric::OfBf16(most) => {
                let plain = Shape { family: Family::PrefillPlain(Plain::Bf16), ..one.shape };
                let Some(plain) = all.iter().find(|other| other.shape == plain) else {
                    return Some(format!("{}: no {plain} to compare with", one.shape));
                };
                let ratio = one.of_square() / plain.of_square();
                if ratio <= most {
                    return None;
                }
                format!("{ratio:.2} of the time of {}, at most {most:.2}", plain.shape)
            }
            Metric::Classes(known) => {
                let others = one.counts.iter().filter(|(class, _)| !known.contains(*class));
                let others: Vec<String> =
                    others.map(|(class, count)| format!("{count} {}", class.name())).collect();
                if others.is_empty() {
                    return None;
                }
                format!("{} in the loop", others.join(", "))
            }
            Metric::Shared(most) if one.resources.shared_bytes > most => {
                let bytes = one.resources.shared_bytes;
                format!("{bytes} bytes of static shared memory, at most {most}")
            }
            _ => return None,
        };
        Some(format!("{}: {wrong} ({})", one.shape, self.why))
    }
}

/// Returns every limit that is passed, and every kernel without one.
pub(super) fn problems(all: &[Figures]) -> Vec<String> {
    let mut problems = Vec::new();
    for one in all {
        let own: Vec<&Limit> = LIMITS.iter().filter(|limit| limit.is_for(&one.shape)).collect();
        problems.extend(own.iter().filter_map(|limit| limit.problem(one, all)));
        // Code, classes, shared memory, and a share of memory, of the tensor pipe or of bf16.
        if own.len() != 4 {
            problems.push(format!("{}: {} limits instead of 4", one.shape, own.len()));
        }
    }
    problems
}
