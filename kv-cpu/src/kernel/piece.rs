//! The query rows of some kv heads against a strip of a context, by pieces of a head and [`PIECE`]
//! tokens at most: they are scored and weighed by one loop, and summed by another.
//!
//! A vector has the scores of all rows by some tokens, so that maxima and exponentials are those of
//! all rows at once. Sums of products stay in registers, and as many query values as there is room
//! for, as loads besides those of K and V slow these down. Pieces come in the order in which memory
//! has them, and while one is at work another one is asked for, a few lines a step
//! (`docs/performance.md`).
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    reason = "rows and lanes are counted by the callers and the types here"
)]
mod ask;
mod bf16;
mod dots;
mod lanes;
mod multiply;
mod rows;
mod strip;
mod sums;
mod weigh;
mod words;

pub(super) use self::bf16::{Coded, Codes, DotBf16, Fp8, LookUp, Paired, Plain};
pub(crate) use self::lanes::{Lanes, Words};
pub(super) use self::multiply::Decoded;
use self::rows::Rows;
use self::strip::Places;
pub(crate) use self::strip::{HeadRows, Strip};
pub(super) use self::sums::{sum, sum_e4m3};
pub(super) use self::weigh::{weigh, weigh_e4m3, weigh_words};
pub(super) use self::words::{Bytes, DotWords};
use super::stored::GROUP;
use super::{Kernels, LANES_MAX, of_encoding};
use crate::encoding::{Encoding, RowLayout};
use crate::read_ahead::Fetch;

/// Most tokens of a piece.
pub(crate) const PIECE: usize = LANES_MAX;

/// Tokens whose scores by so many rows share a vector.
const fn tokens_of(rows: usize) -> usize {
    LANES_MAX / rows.next_power_of_two()
}

/// Most query rows that meet a piece at once.
const ROWS_MAX: usize = 8;

/// The least number of query rows that there are loops for, and that is no less than this one.
const fn rows_of_loops(rows: usize) -> Option<usize> {
    match rows {
        1..=4 => Some(rows),
        5..=ROWS_MAX => Some(ROWS_MAX),
        _ => None,
    }
}

/// Weights of a piece: vectors of lanes `row * tokens_of(rows) + token`, as many as there are.
pub(crate) type Weights = [f32; ROWS_MAX * PIECE];

/// A strip, and the query rows that meet it.
pub(crate) struct Meeting<'a> {
    pub(crate) strip: &'a Strip<'a>,
    /// Those behind it, which may be empty.
    pub(crate) next: [&'a Strip<'a>; 2],
    pub(crate) layouts: [&'a RowLayout; 2],
    /// Query rows of a kv head: such a number as [`Kernels::piece_rows`] answers.
    pub(crate) rows: usize,
    /// The rows, `q_stride` apart, head by head.
    pub(crate) q: &'a [f32],
    pub(crate) q_stride: usize,
    /// The same of heads whose lanes say so, see [`Lanes::put_words`]; half as far apart.
    pub(crate) words: &'a [u32],
    /// What scores are multiplied with.
    pub(crate) scale: f32,
    /// Whether anyone has use for all bits of a weight.
    pub(crate) exact: bool,
    /// By head.
    pub(crate) lanes: &'a mut [Lanes],
    /// Of the piece at hand; multiplied by the scales of V in the end.
    pub(crate) weights: &'a mut Weights,
    /// Sums so far, `out_stride` apart, head by head.
    pub(crate) out: &'a mut [f32],
    pub(crate) out_stride: usize,
}

impl Meeting<'_> {
    /// What the loops rely on.
    fn check(&self) {
        let Strip { heads, tokens, planes } = self.strip;
        assert!(*heads > 0 && *tokens > 0, "a strip has rows");
        for (plane, layout) in planes.iter().zip(self.layouts) {
            let last = (heads - 1) * plane.per_head + (tokens - 1) * plane.stride;
            let fits = plane.bytes == layout.bytes() && last + plane.bytes <= plane.rows.len();
            assert!(fits && layout.dim().is_multiple_of(GROUP), "rows lie inside their strip");
        }
        let [k, v] = self.layouts.map(RowLayout::dim);
        let all = heads * self.rows;
        assert!(
            rows_of_loops(self.rows) == Some(self.rows)
                && self.lanes.len() >= *heads
                && self.q_stride >= k
                && self.q.len() >= all * self.q_stride
                && self.q_stride.is_multiple_of(2)
                && (self.words.len() >= all * self.q_stride / 2
                    || self.lanes.iter().all(|lanes| lanes.words().is_none()))
                && self.out_stride >= v
                && self.out_stride.is_multiple_of(LANES_MAX)
                && self.out.len() >= all * self.out_stride,
            "query and output rows lie inside their slices"
        );
    }
}

/// One of a strip: [`PIECE`] tokens of a head, or fewer.
pub(crate) struct Piece {
    head: usize,
    tokens: usize,
    /// Tokens of all pieces of a head but its last one.
    length: usize,
    /// Where K and V begin, where those that are wanted soon do, and those that are wanted sooner.
    begins: [*const u8; 2],
    soon: [*const u8; 2],
    sooner: [*const u8; 2],
    fetch: Fetch,
}

/// What takes a piece of a strip that was checked.
pub(crate) type Loop = unsafe fn(&mut Meeting<'_>, &Piece);

/// The loops of a CPU, by encoding. Calling one is sound only on such a CPU.
#[derive(Clone)]
pub(crate) struct Loops {
    /// Scores and weighs a piece.
    pub(super) weigh: [Loop; Encoding::COUNT],
    /// The same for queries that are there as such words, where that is faster.
    pub(super) weigh_words: [Option<(Words, Loop)>; Encoding::COUNT],
    /// Adds its values by their weights.
    pub(super) sum: [Loop; Encoding::COUNT],
}

impl Loops {
    /// Other loops for an encoding.
    pub(super) fn set(&mut self, encoding: Encoding, weigh: Loop, sum: Loop) {
        (self.weigh[encoding.index()], self.sum[encoding.index()]) = (weigh, sum);
    }
    pub(super) fn set_weigh_words(&mut self, encoding: Encoding, words: Words, weigh: Loop) {
        self.weigh_words[encoding.index()] = Some((words, weigh));
    }
}

/// Most tokens of a piece of long rows, where K and V come by turns of [`TURN`] bytes: of longer
/// ones memory gives less (`docs/performance.md`).
const SHORT_PIECE: usize = PIECE / 2;
const TURN: usize = 4 << 10;

/// Most tokens of a piece of such keys. Codes of 8 bits and less take long enough for memory.
fn most_tokens(k: &RowLayout) -> usize {
    let is_long = k.bytes() * PIECE > TURN && k.bytes() >= 2 * k.dim();
    if is_long { SHORT_PIECE } else { PIECE }
}

impl Kernels {
    /// As how many query rows so many may meet pieces of rows of these layouts, if at all: as many,
    /// or with some of zeros behind them.
    pub(crate) fn piece_rows(self, rows: usize, layouts: [&RowLayout; 4]) -> Option<usize> {
        let is_whole = |rows: &RowLayout| rows.dim().is_multiple_of(GROUP);
        let has_loops = self.pieces.is_some() && layouts.into_iter().all(is_whole);
        rows_of_loops(rows).filter(|_| has_loops)
    }

    /// As what words query rows best meet rows of K, if as any; `exact` as in [`Meeting`].
    pub(crate) fn words(self, k: &RowLayout, exact: bool) -> Option<Words> {
        let (words, _) = of_encoding(&self.pieces?.weigh_words, k.encoding())?;
        let fit = match words {
            Words::Bf16 => k.dim().is_multiple_of(bf16::PAIRED),
            Words::Fixed => !exact && k.dim() <= words::VALUES_MAX,
        };
        fit.then_some(words)
    }

    /// Lets query rows meet a strip, where [`Self::piece_rows`] has said so.
    pub(crate) fn meet_strip(self, args: &mut Meeting<'_>) {
        let Some(loops) = self.pieces else {
            return;
        };
        args.check();
        let [k, v] = args.layouts.map(RowLayout::encoding);
        let weigh = of_encoding(&loops.weigh, k);
        let words = self.words(args.layouts[0], args.exact);
        let by_words = of_encoding(&loops.weigh_words, k).map_or(weigh, |(_, weigh)| weigh);
        let sum = of_encoding(&loops.sum, v);
        let (strip, [next, last]) = (args.strip, args.next);
        let length = most_tokens(args.layouts[0]);
        // One piece is over too soon for what is asked for along with it.
        let mut places = Places::new([strip, next, last], length);
        places.next();
        let mut sooner = places.next();
        let mut place = (0, 0);
        while place.0 < strip.heads {
            let begins = strip.begins(place);
            let soon = places.next();
            let piece = Piece {
                head: place.0,
                tokens: (strip.tokens - place.1).min(length),
                length,
                begins,
                soon: soon.unwrap_or(begins),
                sooner: sooner.unwrap_or(begins),
                fetch: self.read_ahead.other,
            };
            let are_there = words.is_some() && args.lanes[place.0].words() == words;
            let weigh = if are_there { by_words } else { weigh };
            // SAFETY: the CPU has the instruction set, by `Self::of`. The strip was checked, and
            // the piece is one of it.
            unsafe { weigh(args, &piece) };
            // SAFETY: as above.
            unsafe { sum(args, &piece) };
            (place, sooner) = (strip.behind(place, length), soon);
        }
    }
}

/// Instantiates the loops for one vector type, behind the attributes given.
macro_rules! table {
    ([$(#[$attribute:meta])*] $simd:expr) => {
        /// The loops over pieces.
        pub(super) static PIECES: super::piece::Loops = {
            use super::piece::{self, Decoded, Loops, Meeting, Piece};
            use super::stored::Stored;
            use crate::encoding::Encoding;

            $(#[$attribute])*
            unsafe fn weigh<E: Stored>(args: &mut Meeting<'_>, piece: &Piece) {
                // SAFETY: the condition is passed on.
                unsafe { piece::weigh(Decoded::<_, E>::new($simd), args, piece) };
            }
            $(#[$attribute])*
            unsafe fn weigh_e4m3(args: &mut Meeting<'_>, piece: &Piece) {
                // SAFETY: the condition is passed on.
                unsafe { piece::weigh_e4m3($simd, args, piece) };
            }
            $(#[$attribute])*
            unsafe fn sum<E: Stored>(args: &mut Meeting<'_>, piece: &Piece) {
                // SAFETY: the condition is passed on.
                unsafe { piece::sum(Decoded::<_, E>::new($simd), args, piece) };
            }
            $(#[$attribute])*
            unsafe fn sum_e4m3(args: &mut Meeting<'_>, piece: &Piece) {
                // SAFETY: the condition is passed on.
                unsafe { piece::sum_e4m3($simd, args, piece) };
            }
            Loops {
                weigh: super::table::each!(weigh, weigh_e4m3),
                weigh_words: [None; Encoding::COUNT],
                sum: super::table::each!(sum, sum_e4m3),
            }
        };
    };
}
pub(super) use table;
