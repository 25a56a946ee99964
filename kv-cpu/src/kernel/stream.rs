//! One or two query rows against a few tokens at once: scores, weights and sums in one pass.
//!
//! So few rows wait for memory, which gives most where it is read in its own order, a little of K
//! and a little of V by turns (`docs/performance.md`). Therefore four tokens are scored, weighed
//! and summed before the next four, row by row, and meanwhile others are asked for, as suits the
//! CPU.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::inline_always,
    clippy::needless_range_loop,
    reason = "kernel code: bounds are asserted at the entry, and loops must melt into the function \
              that carries the target features"
)]
mod hint;
mod outputs;

use self::hint::Hint;
use self::outputs::Outputs;
use super::simd::{LANES_MAX, LINE, Simd};
use super::stored::{Bf16Pairs, F16, F32, GROUP, Stored};
use super::tile::HALF;
use super::{Kernels, Running};
use crate::encoding::{Encoding, RowLayout};
use crate::read_ahead::{Fetch, ReadAhead};

/// Tokens that are scored, weighed and summed before the next ones.
const STEP: usize = 4;

/// Rows of some tokens that follow each other, of one kv head.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Part<'a> {
    /// From the first row to the end of the last one.
    pub(crate) rows: &'a [u8],
    /// Bytes from one row to the next.
    pub(crate) stride: usize,
}

/// Some tokens and the query rows that see all of them.
pub(crate) struct Stream<'a> {
    /// Query rows, `stride` apart, one or two.
    pub(crate) q: &'a [f32],
    pub(crate) q_stride: usize,
    /// K and V, and those that come next.
    pub(crate) now: &'a [Part<'a>; 2],
    pub(crate) next: &'a [Part<'a>; 2],
    pub(crate) layouts: [&'a RowLayout; 2],
    pub(crate) tokens: usize,
    /// What scores are multiplied with.
    pub(crate) scale: f32,
    /// Whether anyone has use for all bits of a weight.
    pub(crate) exact: bool,
    /// By row; their number is that of the rows.
    pub(crate) running: &'a mut [Running],
    /// Sums so far, `stride` apart.
    pub(crate) out: &'a mut [f32],
    pub(crate) out_stride: usize,
}

/// The loops of one instruction set. Calling an entry is sound only on a CPU that has it.
pub(crate) struct Table {
    /// Most query rows for which they are faster than tiles.
    pub(super) rows: usize,
    /// Those of an encoding, if it needs no decoding.
    pub(super) loops: fn(Encoding) -> Option<StreamBy>,
}

/// Most query rows for these vectors: with more, sums of usual rows do not stay in registers.
pub(super) const fn rows<S: Simd>(_: S) -> usize {
    if S::SUMS < 16 { 1 } else { 2 }
}

/// An encoding whose values need no decoding.
pub(super) trait InOrder: Stored {}
impl InOrder for F32 {}
impl InOrder for F16 {}
impl InOrder for Bf16Pairs {}

pub(super) type StreamBy = unsafe fn(&mut Stream<'_>, Fetch);

impl Kernels {
    /// Whether so many query rows may meet rows of these layouts so.
    pub(crate) fn has_stream(self, rows: usize, [k, v]: [&RowLayout; 2]) -> bool {
        let is_whole = [k, v].iter().all(|rows| rows.dim().is_multiple_of(GROUP));
        let alike = k.encoding() == v.encoding() && self.stream_by(k.encoding()).is_some();
        self.stream.is_some_and(|table| rows <= table.rows) && is_whole && alike
    }

    /// Lets query rows meet some tokens, where [`Self::has_stream`] has said so.
    pub(crate) fn stream(self, args: &mut Stream<'_>) {
        let [k, v] = args.layouts.map(RowLayout::encoding);
        assert!(k == v, "rows of K and V are of one encoding");
        if let Some(kernel) = self.stream_by(k) {
            let ReadAhead { one_row, other } = self.read_ahead;
            let fetch = if args.running.len() == 1 { one_row } else { other };
            // SAFETY: the CPU has the instruction set, by `Self::of`.
            unsafe { kernel(args, fetch) }
        }
    }

    fn stream_by(self, encoding: Encoding) -> Option<StreamBy> {
        self.stream.and_then(|table| (table.loops)(encoding))
    }
}

/// Scores, weighs and sums all tokens.
#[inline(always)]
pub(super) fn stream<S: Simd, E: InOrder>(s: S, args: &mut Stream<'_>, fetch: Fetch) {
    match fetch {
        Fetch::First => by_shape::<S, E, hint::First>(s, args),
        Fetch::Second | Fetch::Twice => by_shape::<S, E, hint::Second>(s, args),
        Fetch::Near => by_shape::<S, E, hint::Near>(s, args),
        Fetch::Nothing => by_shape::<S, E, hint::Nothing>(s, args),
    }
}

/// Sums of usual rows stay in registers, where those are enough.
#[inline(always)]
fn by_shape<S: Simd, E: InOrder, H: Hint>(s: S, args: &mut Stream<'_>) {
    let dims = args.layouts.map(RowLayout::dim);
    match (args.running.len(), dims) {
        (1, [64, 64]) if S::SUMS == 16 => stream_rows::<S, E, H, 1, 4>(s, args),
        (1, [128, 128]) if S::SUMS == 16 => stream_rows::<S, E, H, 1, 8>(s, args),
        (2, [64, 64]) if S::SUMS == 16 => stream_rows::<S, E, H, 2, 4>(s, args),
        (2, [128, 128]) if S::SUMS == 16 => stream_rows::<S, E, H, 2, 8>(s, args),
        (1, _) => stream_rows::<S, E, H, 1, 0>(s, args),
        _ => stream_rows::<S, E, H, 2, 0>(s, args),
    }
}

/// What a step knows of its rows.
struct Rows<'a> {
    first: *const u8,
    stride: usize,
    /// Where what is asked for along with them begins, and how far its rows are apart.
    next: *const u8,
    next_stride: usize,
    layout: &'a RowLayout,
}

impl<'a> Rows<'a> {
    fn new<H: Hint>(args: &Stream<'a>, plane: usize) -> Self {
        let (now, next, layout) = (args.now[plane], args.next[plane], args.layouts[plane]);
        let fits = args.tokens.checked_sub(1);
        let fits = fits.is_some_and(|last| last * now.stride + layout.bytes() <= now.rows.len());
        assert!(fits && layout.dim().is_multiple_of(GROUP), "rows lie inside their part");
        let (first, stride) = (now.rows.as_ptr(), now.stride);
        let (next, next_stride) = match H::VALUES_AHEAD {
            Some(values) => {
                (first.wrapping_add(values.div_ceil(layout.dim().max(1)) * stride), stride)
            }
            None => (next.rows.as_ptr(), next.stride),
        };
        Self { first, stride, next, next_stride, layout }
    }

    /// Where a row begins, and what is asked for along with it.
    #[inline(always)]
    fn at(&self, token: usize) -> [*const u8; 2] {
        let next = self.next.wrapping_add(token * self.next_stride);
        [self.first.wrapping_add(token * self.stride), next]
    }
}

/// `R` rows. Of sums of `N` vectors all stay in registers; of none they are in memory.
#[inline(always)]
fn stream_rows<S: Simd, E: InOrder, H: Hint, const R: usize, const N: usize>(
    s: S,
    args: &mut Stream<'_>,
) {
    let (k, v) = (Rows::new::<H>(args, 0), Rows::new::<H>(args, 1));
    let dims = [k.layout.dim(), v.layout.dim()];
    assert!(
        args.running.len() == R
            && (N == 0 || dims == [N * S::LANES; 2])
            && args.q_stride >= dims[0]
            && args.q.len() >= R * args.q_stride
            && args.out_stride >= dims[1]
            && args.out.len() >= R * args.out_stride,
        "query and output rows lie inside their slices"
    );
    let (q, scale, exact) = ((args.q, args.q_stride), args.scale, args.exact);
    let out = (&mut *args.out, args.out_stride);
    let mut outputs = Outputs::<S, R, N>::new(s, &mut *args.running, out, dims[1]);
    let mut token = 0;
    while token + STEP <= args.tokens {
        let scores = scores::<S, E, H, R, N, STEP>(s, q, &k, token);
        let weights = outputs.weigh(s, scores, (scale, exact));
        outputs.add::<E, H, STEP>(s, &v, &weights, token);
        token += STEP;
    }
    while token < args.tokens {
        let scores = scores::<S, E, H, R, N, 1>(s, q, &k, token);
        let weights = outputs.weigh(s, scores, (scale, exact));
        outputs.add::<E, H, 1>(s, &v, &weights, token);
        token += 1;
    }
    outputs.finish(s);
}

/// Scores of `T` tokens, [`STEP`] or one, by `R` rows: lane `i` has that of token `i % STEP`, or
/// negative infinity.
#[inline(always)]
fn scores<S: Simd, E: InOrder, H: Hint, const R: usize, const N: usize, const T: usize>(
    s: S,
    q: (&[f32], usize),
    k: &Rows<'_>,
    token: usize,
) -> [S::F; R] {
    let mut dots = [[s.splat(0.0); STEP]; R];
    for j in 0..T {
        let sums = dot::<S, E, H, R, N>(s, q, k, token + j);
        for r in 0..R {
            dots[r][j] = sums[r];
        }
    }
    let mut scores = [s.splat(0.0); R];
    for r in 0..R {
        scores[r] = s.reduce_add4(dots[r]);
        if T < STEP {
            let mut lanes = [0.0; LANES_MAX];
            // SAFETY: an array of `LANES_MAX`.
            unsafe { s.store(lanes.as_mut_ptr(), 0, scores[r]) };
            lanes[T..].fill(f32::NEG_INFINITY);
            // SAFETY: as above.
            scores[r] = unsafe { s.load(lanes.as_ptr(), 0) };
        }
    }
    scores
}

/// Products of a row of K with `R` query rows, by lane.
#[inline(always)]
fn dot<S: Simd, E: InOrder, H: Hint, const R: usize, const N: usize>(
    s: S,
    (q, stride): (&[f32], usize),
    k: &Rows<'_>,
    token: usize,
) -> [S::F; R] {
    let [row, next] = k.at(token);
    let groups = if N > 0 { N * S::LANES / GROUP } else { k.layout.dim() / GROUP };
    let mut sums = [[s.splat(0.0); 2]; R];
    for i in 0..groups {
        let (group, bytes) = (i * GROUP, i * E::LINES * LINE);
        for line in 0..E::LINES {
            H::ask(s, next.wrapping_add(bytes + line * LINE));
        }
        for offset in (0..HALF).step_by(S::LANES) {
            // SAFETY: a whole group of a row, see `Rows::new`.
            let keys = unsafe { E::load_pair(s, row, k.layout, group, offset) };
            for r in 0..R {
                for half in 0..2 {
                    let at = r * stride + group + offset + half * HALF;
                    // SAFETY: values of a query row, as `stream_rows` has asserted.
                    let query = unsafe { s.load(q.as_ptr(), at) };
                    sums[r][half] = s.fma(query, keys[half], sums[r][half]);
                }
            }
        }
    }
    H::after_row();
    sums.map(|[even, odd]| s.add(even, odd))
}

/// Instantiates the loops for one vector type, behind the attributes given.
macro_rules! table {
    ([$(#[$attribute:meta])*] $simd:expr) => {
        /// The loops that score, weigh and sum at once.
        pub(super) static STREAM: super::stream::Table = {
            use super::stored::{Bf16Pairs, F16, F32};
            use super::stream::{InOrder, Stream, StreamBy, Table, rows, stream};
            use crate::encoding::Encoding;
            use crate::read_ahead::Fetch;

            $(#[$attribute])*
            fn by<E: InOrder>(args: &mut Stream<'_>, fetch: Fetch) {
                stream::<_, E>($simd, args, fetch);
            }
            fn loops(encoding: Encoding) -> Option<StreamBy> {
                match encoding {
                    Encoding::F32 => Some(by::<F32>),
                    Encoding::F16 => Some(by::<F16>),
                    Encoding::Bf16Pairs => Some(by::<Bf16Pairs>),
                    _ => None,
                }
            }
            Table { rows: rows($simd), loops }
        };
    };
}
pub(super) use table;
