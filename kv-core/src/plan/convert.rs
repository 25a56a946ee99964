//! Conversion of rows between `bshd`, `sbhd` and `thd`.
use crate::error::{OptionProblem, PlanError};
use crate::geometry::Axes;
use crate::num::to_u32;
use crate::tensor::{TensorView, TensorViewMut, TokenRequirement, TokenTensor, TokenTensorMut};

/// Lengths of a batch of token rows, for conversions between formats and element types.
///
/// Mirrors TransformerEngine's `convert_thd_to_bshd` and `convert_bshd_to_thd`, for all nine pairs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConvertPlan {
    starts: Vec<u32>,
    len_max: u32,
}

impl ConvertPlan {
    /// Creates a batch of entries with the given lengths, in tokens.
    ///
    /// # Errors
    /// [`PlanError::TooMany`] when the total does not fit `u32`.
    pub fn new(lens: &[u32]) -> Result<Self, PlanError> {
        let mut starts = vec![0];
        let mut total = 0_u32;
        for &len in lens {
            total = total.checked_add(len).ok_or(PlanError::TooMany {
                what: "tokens to convert",
                got: u64::from(total) + u64::from(len),
                max: u64::from(u32::MAX),
            })?;
            starts.push(total);
        }
        Ok(Self { starts, len_max: lens.iter().copied().max().unwrap_or(0) })
    }
    /// Creates a batch from its prefix sums, `cu_seqlens[0] == 0`.
    ///
    /// # Errors
    /// [`PlanError::Option`] when the sums are empty, do not start at 0 or fall.
    pub fn from_cu_seqlens(cu_seqlens: &[u32]) -> Result<Self, PlanError> {
        let refuse = |problem| Err(PlanError::Option { option: "cu_seqlens", problem });
        let first = cu_seqlens.first().copied();
        if first != Some(0) {
            return refuse(OptionProblem::NotFromZero { first });
        }
        let pairs = cu_seqlens.iter().zip(cu_seqlens.iter().skip(1));
        let mut lens = Vec::with_capacity(pairs.len());
        for (index, (before, got)) in (1..).zip(pairs) {
            let Some(len) = got.checked_sub(*before) else {
                return refuse(OptionProblem::Falls { index, before: *before, got: *got });
            };
            lens.push(len);
        }
        Self::new(&lens)
    }
    /// Returns the number of entries.
    pub fn batch(&self) -> usize {
        self.starts.len() - 1
    }
    /// Iterates over the first ragged row and the number of tokens of every entry.
    pub fn entries(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        let ends = self.starts.iter().skip(1);
        self.starts.iter().zip(ends).map(|(start, end)| (*start, end - *start))
    }
    /// Returns the tokens of all entries.
    pub fn total(&self) -> u32 {
        self.starts.last().copied().unwrap_or(0)
    }
}

/// Tensors of one conversion, checked against a [`ConvertPlan`].
#[derive(Debug)]
pub struct ConvertArgs<'a, Buf> {
    src: TokenTensor<'a, Buf>,
    dst: TokenTensorMut<'a, Buf>,
}

impl<'a, Buf> ConvertArgs<'a, Buf> {
    /// Checks both tensors; padding rows of `src` are not read, those of `dst` become zero.
    ///
    /// # Errors
    /// Those of [`AttendArgs::new`](crate::plan::AttendArgs::new) for its tensors.
    pub fn new(
        plan: &ConvertPlan,
        (src, from): (TensorView<'a, Buf>, Axes),
        (dst, to): (TensorViewMut<'a, Buf>, Axes),
    ) -> Result<Self, PlanError> {
        let need = |tensor, axes, heads, dim| TokenRequirement {
            tensor,
            axes,
            batch: to_u32(plan.batch()),
            tokens_max: plan.len_max,
            tokens_total: plan.total(),
            heads,
            dim,
        };
        let dim = src.dims().as_slice().last().copied().unwrap_or(0);
        let src = TokenTensor::check(src, &need("src", from, None, dim))?;
        let heads = src.rows().heads();
        let dst = TokenTensorMut::check(dst, &need("dst", to, Some(heads), dim))?;
        Ok(Self { src, dst })
    }
    /// Returns the source.
    pub fn src(&self) -> &TokenTensor<'a, Buf> {
        &self.src
    }
    /// Returns the target.
    pub fn dst(&mut self) -> &mut TokenTensorMut<'a, Buf> {
        &mut self.dst
    }
    /// Returns the outputs: only the target.
    pub fn outputs(&mut self) -> [Option<&mut TokenTensorMut<'a, Buf>>; 2] {
        [Some(&mut self.dst), None]
    }
    pub(crate) fn into_parts(self) -> (TokenTensor<'a, Buf>, TokenTensorMut<'a, Buf>) {
        (self.src, self.dst)
    }
    pub(crate) fn from_parts(src: TokenTensor<'a, Buf>, dst: TokenTensorMut<'a, Buf>) -> Self {
        Self { src, dst }
    }
}
