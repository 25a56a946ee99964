//! The choice of the algorithm that runs a work item: the only place that decides.
//!
//! [`RULES`] is an ordered table. The first strategy that does not refuse runs; a refusal depends
//! on [`Facts`] of the plan, the layouts and the CPU, never on values.
use std::fmt;
use std::sync::{LazyLock, Mutex, PoisonError};

use kv_cpu_kernels::{Encoding, Isa};

/// An algorithm for the query rows of one kv head against a part of a context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Strategy {
    /// AMX matrix products with query rows as rows: K and V of a tile are packed once for all rows.
    AmxGemm,
    /// AMX matrix products with query rows as columns, which leaves K where it lies.
    AmxNarrow,
    /// One query: K and V are read in memory order, block by block, and decoded in registers by
    /// each register tile.
    Direct,
    /// A tile of K and V is decoded to `f32` once for all query rows.
    Tiled,
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AmxGemm => "AMX GEMM",
            Self::AmxNarrow => "AMX narrow",
            Self::Direct => "direct",
            Self::Tiled => "tiled",
        })
    }
}

/// The reason for which a strategy does not run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Refusal {
    /// The instruction set has no AMX.
    NoAmx,
    /// AMX kernels cannot read the stored rows.
    Encoding(Encoding),
    /// There are too few query rows for the strategy to be faster.
    FewRows { rows: usize, least: usize },
    /// There are too many query rows for the strategy to be faster.
    ManyRows { rows: usize, most: usize },
    /// Several queries see different keys.
    SeveralQueries(u32),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoAmx => f.write_str("no AMX"),
            Self::Encoding(encoding) => write!(f, "rows of {encoding:?} have no AMX kernels"),
            Self::FewRows { rows, least } => {
                write!(f, "{rows} query rows per kv head, faster from {least} on")
            }
            Self::ManyRows { rows, most } => {
                write!(f, "{rows} query rows per kv head, faster up to {most}")
            }
            Self::SeveralQueries(queries) => write!(f, "{queries} queries see different keys"),
        }
    }
}

/// The facts that a choice depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Facts {
    /// The instruction set in use.
    pub(crate) isa: Isa,
    /// Queries of the work item.
    pub(crate) queries: u32,
    /// Query rows per kv head: queries times the heads of a group.
    pub(crate) rows: usize,
    /// Encodings of K and of V: codes, then rows kept in 16 bits.
    pub(crate) k: [Encoding; 2],
    pub(crate) v: [Encoding; 2],
}

/// Most query rows for which [`Strategy::Direct`] is faster. Each register tile of up to 8 rows
/// decodes K and V again, which costs less than storing decoded rows until there are four of them.
const DIRECT_ROWS: usize = 16;
/// Query rows that fill a block of AMX, or from which on packing a tile pays off.
pub(super) const AMX_BLOCK: usize = 16;

impl Facts {
    /// Returns whether AMX may run work items of enough query rows.
    pub(super) fn may_use_amx(&self) -> bool {
        self.no_amx().is_none()
    }
    fn no_amx(&self) -> Option<Refusal> {
        if !self.isa.has_amx() {
            return Some(Refusal::NoAmx);
        }
        let all = self.k.into_iter().chain(self.v);
        all.into_iter().find(|encoding| !has_amx(*encoding)).map(Refusal::Encoding)
    }
    fn rows_below(&self, least: usize) -> Option<Refusal> {
        (self.rows < least).then_some(Refusal::FewRows { rows: self.rows, least })
    }
    fn rows_above(&self, most: usize) -> Option<Refusal> {
        (self.rows > most).then_some(Refusal::ManyRows { rows: self.rows, most })
    }
    fn several_queries(&self) -> Option<Refusal> {
        (self.queries > 1).then_some(Refusal::SeveralQueries(self.queries))
    }
    /// Returns the query rows from which on AMX is faster than vectors with query rows as columns.
    fn amx_rows_min(&self) -> usize {
        let [k, _] = self.k;
        let [v, _] = self.v;
        amx_rows_min(k).max(amx_rows_min(v))
    }
}

/// Returns whether AMX kernels read this encoding: its values are sums of one or two bf16.
fn has_amx(encoding: Encoding) -> bool {
    matches!(
        encoding,
        Encoding::F16
            | Encoding::Bf16
            | Encoding::Bf16Pairs
            | Encoding::E4m3
            | Encoding::E5m2
            | Encoding::Int8
    )
}

/// Returns the query rows from which on AMX is faster for an encoding: a product of blocks takes as
/// long for one query row as for sixteen (`docs/adr/0010-matrix-unit.md`).
fn amx_rows_min(encoding: Encoding) -> usize {
    match encoding {
        Encoding::E4m3 => 1,
        Encoding::E5m2 => 2,
        Encoding::Bf16 | Encoding::Bf16Pairs | Encoding::Int8 => 5,
        _ => 13,
    }
}

/// A strategy, and why it does not run.
struct Rule {
    strategy: Strategy,
    refuses: fn(&Facts) -> Option<Refusal>,
}

/// In order: the first rule that does not refuse wins, and the last never does.
const RULES: [Rule; 4] = [
    Rule {
        strategy: Strategy::AmxGemm,
        refuses: |facts| facts.no_amx().or(facts.rows_below(AMX_BLOCK)),
    },
    Rule {
        strategy: Strategy::AmxNarrow,
        refuses: |facts| {
            let few = facts.rows_below(facts.amx_rows_min());
            facts.no_amx().or(few).or(facts.rows_above(AMX_BLOCK - 1))
        },
    },
    Rule {
        strategy: Strategy::Direct,
        refuses: |facts| facts.several_queries().or(facts.rows_above(DIRECT_ROWS)),
    },
    Rule { strategy: Strategy::Tiled, refuses: |_| None },
];

/// The strategy for these facts.
pub(crate) fn choose(facts: &Facts) -> Strategy {
    let rule = RULES.iter().find(|rule| (rule.refuses)(facts).is_none());
    rule.map_or(Strategy::Tiled, |rule| rule.strategy)
}

/// The strategy that runs where AMX gave sums that are not finite.
pub(crate) fn choose_vectors(facts: &Facts) -> Strategy {
    choose(&Facts { isa: facts.isa.without_amx(), ..*facts })
}

/// The choice in words: the strategy that runs, and for each faster one why it does not.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Explanation(pub(crate) Facts);

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(facts) = self;
        write!(f, "{}", choose(facts))?;
        for rule in &RULES {
            match (rule.refuses)(facts) {
                Some(refusal) => write!(f, "; not {}: {refusal}", rule.strategy)?,
                None => break,
            }
        }
        Ok(())
    }
}

/// Writes a choice to standard error, once for the same facts, where the environment variable
/// `KV_LOG` names `attend`.
#[expect(clippy::print_stderr, reason = "`KV_LOG` requests it")]
pub(crate) fn log(facts: &Facts) {
    static IS_ON: LazyLock<bool> = LazyLock::new(|| {
        let named = std::env::var("KV_LOG").unwrap_or_default();
        named.split(',').any(|name| name.trim() == "attend")
    });
    static SEEN: Mutex<Vec<Facts>> = Mutex::new(Vec::new());
    if !*IS_ON {
        return;
    }
    let mut seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
    if !seen.contains(facts) {
        seen.push(*facts);
        let Facts { isa, queries, rows, k: [k, _], v: [v, _], .. } = facts;
        let why = Explanation(*facts);
        eprintln!("attend: {queries} queries, {rows} rows, K {k:?}, V {v:?}, {isa}: {why}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One query of one head over bf16, without AMX.
    const DECODE: Facts = Facts {
        isa: Isa::AVX512,
        queries: 1,
        rows: 1,
        k: [Encoding::Bf16Pairs; 2],
        v: [Encoding::Bf16Pairs; 2],
    };

    fn amx() -> Isa {
        *Isa::ALL.last().unwrap()
    }

    fn refusal(strategy: Strategy, facts: &Facts) -> Option<Refusal> {
        let rule = RULES.iter().find(|rule| rule.strategy == strategy).unwrap();
        (rule.refuses)(facts)
    }

    #[test]
    fn every_strategy_has_its_rule_in_order() {
        let rules: Vec<_> = RULES.iter().map(|rule| rule.strategy).collect();
        let all = [Strategy::AmxGemm, Strategy::AmxNarrow, Strategy::Direct, Strategy::Tiled];
        assert_eq!(rules, all);
    }

    #[test]
    fn amx_gemm_takes_blocks_of_rows() {
        let gemm = |facts: &Facts| refusal(Strategy::AmxGemm, facts);
        let prompt = Facts { isa: amx(), queries: 4, rows: 16, ..DECODE };
        assert_eq!((gemm(&prompt), choose(&prompt)), (None, Strategy::AmxGemm));
        let few = Refusal::FewRows { rows: 15, least: 16 };
        assert_eq!(gemm(&Facts { rows: 15, ..prompt }), Some(few));
        assert_eq!(gemm(&Facts { isa: Isa::AVX512, ..prompt }), Some(Refusal::NoAmx));
        let l4 = Facts { v: [Encoding::L4, Encoding::F16], ..prompt };
        assert_eq!(gemm(&l4), Some(Refusal::Encoding(Encoding::L4)));
        let wide = Facts { k: [Encoding::Int8, Encoding::F32], ..prompt };
        assert_eq!(gemm(&wide), Some(Refusal::Encoding(Encoding::F32)));
    }

    #[test]
    fn amx_narrow_takes_enough_rows_of_an_encoding() {
        let narrow = |facts: &Facts| refusal(Strategy::AmxNarrow, facts);
        for (encoding, least) in [
            (Encoding::E4m3, 1),
            (Encoding::E5m2, 2),
            (Encoding::Int8, 5),
            (Encoding::Bf16Pairs, 5),
            (Encoding::F16, 13),
        ] {
            let both = [encoding; 2];
            let facts = Facts { isa: amx(), rows: least, k: both, v: both, ..DECODE };
            assert_eq!((narrow(&facts), choose(&facts)), (None, Strategy::AmxNarrow));
            let fewer = Facts { rows: least - 1, ..facts };
            let few = Refusal::FewRows { rows: least - 1, least };
            assert!(least == 1 || narrow(&fewer) == Some(few), "{encoding:?}");
            let v = Facts { v: [Encoding::F16; 2], rows: 12, ..facts };
            assert_eq!(narrow(&v), Some(Refusal::FewRows { rows: 12, least: 13 }));
        }
        let many = Refusal::ManyRows { rows: 16, most: 15 };
        assert_eq!(narrow(&Facts { isa: amx(), rows: 16, ..DECODE }), Some(many));
        assert_eq!(narrow(&DECODE), Some(Refusal::NoAmx));
    }

    #[test]
    fn direct_takes_one_query_of_few_rows() {
        let direct = |facts: &Facts| refusal(Strategy::Direct, facts);
        for rows in 1..=DIRECT_ROWS {
            let facts = Facts { rows, ..DECODE };
            assert_eq!((direct(&facts), choose(&facts)), (None, Strategy::Direct));
        }
        let many = Facts { rows: 17, ..DECODE };
        assert_eq!(direct(&many), Some(Refusal::ManyRows { rows: 17, most: 16 }));
        let drafts = Facts { queries: 2, rows: 2, ..DECODE };
        assert_eq!(direct(&drafts), Some(Refusal::SeveralQueries(2)));
    }

    #[test]
    fn tiled_takes_everything_else() {
        for facts in [
            Facts { queries: 2, rows: 2, ..DECODE },
            Facts { rows: 71, ..DECODE },
            Facts { isa: amx(), queries: 512, rows: 512, k: [Encoding::F32; 2], ..DECODE },
        ] {
            assert_eq!((refusal(Strategy::Tiled, &facts), choose(&facts)), (None, Strategy::Tiled));
        }
    }

    #[test]
    fn non_finite_sums_of_amx_run_again_on_vectors() {
        let prompt = Facts { isa: amx(), queries: 4, rows: 16, ..DECODE };
        assert_eq!(choose_vectors(&prompt), Strategy::Tiled);
        let narrow = Facts { isa: amx(), rows: 8, ..DECODE };
        assert_eq!(choose_vectors(&narrow), Strategy::Direct);
    }

    #[test]
    fn a_choice_is_explained() {
        let text = Explanation(Facts { rows: 71, ..DECODE }).to_string();
        assert_eq!(
            text,
            "tiled; not AMX GEMM: no AMX; not AMX narrow: no AMX; \
             not direct: 71 query rows per kv head, faster up to 16"
        );
    }
}
