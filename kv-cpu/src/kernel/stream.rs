//! One or two query rows against a few tokens at once: scores, weights and sums in one pass.
//!
//! So few rows wait for memory, which gives most where it is read in its own order, a little of K
//! and a little of V by turns (`docs/performance.md`). Therefore four tokens are scored, weighed
//! and summed before the next four, row by row, and meanwhile the same place of what comes next is
//! asked for, where that suits the CPU.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::inline_always,
    clippy::needless_range_loop,
    reason = "kernel code: bounds are asserted at the entry, and loops must melt into the function \
              that carries the target features"
)]
mod outputs;

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
    pub(super) loops: fn(Encoding) -> Option<[StreamBy; 2]>,
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

/// With shorter exponentials, or with exact ones.
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
        if let Some([short, exact]) = self.stream_by(k) {
            let kernel = if args.exact { exact } else { short };
            let ReadAhead { one_row, other } = self.read_ahead;
            let fetch = if args.running.len() == 1 { one_row } else { other };
            // SAFETY: the CPU has the instruction set, by `Self::of`.
            unsafe { kernel(args, fetch) }
        }
    }

    fn stream_by(self, encoding: Encoding) -> Option<[StreamBy; 2]> {
        self.stream.and_then(|table| (table.loops)(encoding))
    }
}

/// Scores, weighs and sums all tokens. Sums of usual rows stay in registers, where those are many.
#[inline(always)]
pub(super) fn stream<S: Simd, E: InOrder, const EXACT: bool>(
    s: S,
    args: &mut Stream<'_>,
    fetch: Fetch,
) {
    let dims = args.layouts.map(RowLayout::dim);
    match (args.running.len(), dims) {
        (1, [64, 64]) if S::SUMS == 16 => stream_rows::<S, E, EXACT, 1, 4>(s, args, fetch),
        (1, [128, 128]) if S::SUMS == 16 => stream_rows::<S, E, EXACT, 1, 8>(s, args, fetch),
        (2, [64, 64]) if S::SUMS == 16 => stream_rows::<S, E, EXACT, 2, 4>(s, args, fetch),
        (2, [128, 128]) if S::SUMS == 16 => stream_rows::<S, E, EXACT, 2, 8>(s, args, fetch),
        (1, _) => stream_rows::<S, E, EXACT, 1, 0>(s, args, fetch),
        _ => stream_rows::<S, E, EXACT, 2, 0>(s, args, fetch),
    }
}

/// What a step knows of its rows.
struct Rows<'a> {
    first: *const u8,
    stride: usize,
    /// Where the same rows of what comes next begin, and how far they are apart.
    next: *const u8,
    next_stride: usize,
    fetch: Fetch,
    layout: &'a RowLayout,
}

impl<'a> Rows<'a> {
    fn new(args: &Stream<'a>, plane: usize, fetch: Fetch) -> Self {
        let (now, next, layout) = (args.now[plane], args.next[plane], args.layouts[plane]);
        let fits = args.tokens.checked_sub(1);
        let fits = fits.is_some_and(|last| last * now.stride + layout.bytes() <= now.rows.len());
        assert!(fits && layout.dim().is_multiple_of(GROUP), "rows lie inside their part");
        let (first, stride) = (now.rows.as_ptr(), now.stride);
        let (next, next_stride) = (next.rows.as_ptr(), next.stride);
        Self { first, stride, next, next_stride, fetch, layout }
    }

    /// Where the rows of a step begin, and those of what comes next at the same place.
    #[inline(always)]
    fn at(&self, token: usize) -> ([*const u8; STEP], [*const u8; STEP]) {
        let (mut rows, mut next) = ([self.first; STEP], [self.next; STEP]);
        for j in 0..STEP {
            rows[j] = self.first.wrapping_add((token + j) * self.stride);
            next[j] = self.next.wrapping_add((token + j) * self.next_stride);
        }
        (rows, next)
    }
}

/// `R` rows. Of sums of `N` vectors all stay in registers; of none they are in memory.
#[inline(always)]
fn stream_rows<S: Simd, E: InOrder, const EXACT: bool, const R: usize, const N: usize>(
    s: S,
    args: &mut Stream<'_>,
    fetch: Fetch,
) {
    let (k, v) = (Rows::new(args, 0, fetch), Rows::new(args, 1, fetch));
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
    let (q, scale) = ((args.q, args.q_stride), args.scale);
    let out = (&mut *args.out, args.out_stride);
    let mut outputs = Outputs::<S, R, N>::new(s, &mut *args.running, out, dims[1]);
    let mut token = 0;
    // Whole steps have a length that the compiler knows.
    while token + STEP <= args.tokens {
        let scores = scores::<S, E, R, N>(s, q, &k, (token, STEP));
        let weights = outputs.weigh::<EXACT>(s, scores, scale);
        outputs.add::<E>(s, &v, &weights, (token, STEP));
        token += STEP;
    }
    if token < args.tokens {
        let some = (token, args.tokens - token);
        let scores = scores::<S, E, R, N>(s, q, &k, some);
        let weights = outputs.weigh::<EXACT>(s, scores, scale);
        outputs.add::<E>(s, &v, &weights, some);
    }
    outputs.finish(s);
}

/// Scores of [`STEP`] tokens, or of as many as there are, by `R` rows: lane `i` has that of token
/// `i % STEP`, or negative infinity.
#[inline(always)]
fn scores<S: Simd, E: InOrder, const R: usize, const N: usize>(
    s: S,
    (q, stride): (&[f32], usize),
    k: &Rows<'_>,
    (token, tokens): (usize, usize),
) -> [S::F; R] {
    let mut dots = [[s.splat(0.0); STEP]; R];
    let (rows, next) = k.at(token);
    let groups = if N > 0 { N * S::LANES / GROUP } else { k.layout.dim() / GROUP };
    for j in 0..tokens {
        // By row of their own: `dots` is in memory, as `j` is not known when this is compiled.
        let mut sums = [[s.splat(0.0); 2]; R];
        for i in 0..groups {
            let (group, bytes) = (i * GROUP, i * E::LINES * LINE);
            for line in 0..E::LINES {
                k.fetch.ask(s, next[j].wrapping_add(bytes + line * LINE));
            }
            for offset in (0..HALF).step_by(S::LANES) {
                // SAFETY: a whole group of a row, see `Rows::new`.
                let keys = unsafe { E::load_pair(s, rows[j], k.layout, group, offset) };
                for r in 0..R {
                    for half in 0..2 {
                        let at = r * stride + group + offset + half * HALF;
                        // SAFETY: values of a query row, as the caller has asserted.
                        let query = unsafe { s.load(q.as_ptr(), at) };
                        sums[r][half] = s.fma(query, keys[half], sums[r][half]);
                    }
                }
            }
        }
        for r in 0..R {
            dots[r][j] = s.add(sums[r][0], sums[r][1]);
        }
    }
    let mut scores = [s.splat(0.0); R];
    for r in 0..R {
        scores[r] = s.reduce_add4(dots[r]);
        if tokens < STEP {
            let mut lanes = [0.0; LANES_MAX];
            // SAFETY: an array of `LANES_MAX`.
            unsafe { s.store(lanes.as_mut_ptr(), 0, scores[r]) };
            lanes[tokens..].fill(f32::NEG_INFINITY);
            // SAFETY: as above.
            scores[r] = unsafe { s.load(lanes.as_ptr(), 0) };
        }
    }
    scores
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
            fn by<E: InOrder, const EXACT: bool>(args: &mut Stream<'_>, fetch: Fetch) {
                stream::<_, E, EXACT>($simd, args, fetch);
            }
            fn loops(encoding: Encoding) -> Option<[StreamBy; 2]> {
                match encoding {
                Encoding::F32 => Some([by::<F32, false>, by::<F32, true>]),
                Encoding::F16 => Some([by::<F16, false>, by::<F16, true>]),
                Encoding::Bf16Pairs => Some([by::<Bf16Pairs, false>, by::<Bf16Pairs, true>]),
                _ => None,
                }
            }
            Table { rows: rows($simd), loops }
        };
    };
}
pub(super) use table;
