//! `quant-meta/1`: K, V and some of Q of a model at work, and what storing K or V costs.
//!
//! Constants come from the first half of the tokens; the queries of the second half attend. The
//! error is that of attention's output, squared, relative to the output's own energy, over all
//! layers and heads.
//!
//! It may be twice what a first-order analysis of this very recording says. A format of relative
//! squared error `D` on normal rows, behind a rotation, moves a score by white noise of variance
//! `scale^2 |q'|^2 |k'|^2 D / d`, `q'` and `k'` being transformed, and an output by the score's
//! change times `p (v - out)`; it moves a value's share by `p^2 |v|^2 D`. So
//!
//! ```text
//! K: sum over keys of p^2 |v - out|^2 scale^2 |q'|^2 |k'|^2 D / d        V: sum of p^2 |v|^2 D
//! ```
//!
//! The factor two is that of every tolerance here: the analysis leaves out higher orders, and how
//! far a head's rows are from normal ones.
use std::fs;
use std::path::{Path, PathBuf};

use kv_core::{Calibration, KvFormat};
use serde_json::Value;

use crate::case::{At, CaseError, CaseResult, Outcome, ensure};
use crate::device::Device;
use crate::lab::recorded;
