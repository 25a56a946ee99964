//! Weights of one layer, taken by name.
use candle_core::Tensor;
use candle_nn::Linear;

use crate::error::{Error, WeightError};
use crate::num::to_usize;
use crate::weights::Weights;

/// The weights of a model, and the prefix of one layer.
pub(super) struct Part<'w> {
    pub(super) weights: &'w mut Weights,
    pub(super) layer: u16,
    /// Whether the weights of norms are kept less one.
    pub(super) norms_less_one: bool,
}

impl Part<'_> {
    fn name(&self, part: &str) -> String {
        format!("model.layers.{}.{part}", self.layer)
    }

    pub(super) fn norm(&mut self, part: &str, width: u32) -> Result<Tensor, Error> {
        let weight = self.weights.take(&self.name(&format!("{part}.weight")), &[width])?;
        Ok(if self.norms_less_one { weight.affine(1.0, 1.0)? } else { weight })
    }

    pub(super) fn norm_if(
        &mut self,
        is_there: bool,
        part: &str,
        width: u32,
    ) -> Result<Option<Tensor>, Error> {
        is_there.then(|| self.norm(part, width)).transpose()
    }

    /// Takes a tensor.
    pub(super) fn tensor(&mut self, part: &str, shape: &[u32]) -> Result<Tensor, Error> {
        Ok(self.weights.take(&self.name(part), shape)?)
    }

    /// Takes the values of a tensor.
    pub(super) fn values(&mut self, part: &str, shape: &[u32]) -> Result<Vec<f32>, Error> {
        Ok(self.tensor(part, shape)?.flatten_all()?.to_vec1()?)
    }

    pub(super) fn linear(
        &mut self,
        part: &str,
        out: u32,
        inputs: u32,
        has_bias: bool,
    ) -> Result<Linear, Error> {
        let weight = self.weights.take(&self.name(&format!("{part}.weight")), &[out, inputs])?;
        let bias = self.name(&format!("{part}.bias"));
        // A bias in the file is used, whatever the configuration says.
        let has_bias = has_bias || self.weights.contains(&bias);
        let bias = if has_bias { Some(self.weights.take(&bias, &[out])?) } else { None };
        Ok(Linear::new(weight, bias))
    }

    /// Splits a projection whose rows are `groups` times those of each width in turn.
    pub(super) fn split<const N: usize>(
        &mut self,
        part: &str,
        (groups, widths): (u32, [u32; N]),
        inputs: u32,
        has_bias: bool,
    ) -> Result<[Linear; N], Error> {
        let group = widths.iter().try_fold(0_u32, |sum, width| sum.checked_add(*width));
        let all = group.and_then(|group| group.checked_mul(groups));
        let all = all.ok_or(WeightError::FusedTooWide { rows: widths.to_vec() })?;
        let whole = self.linear(part, all, inputs, has_bias)?;
        let (groups, inputs) = (to_usize(groups), to_usize(inputs));
        let weight = whole.weight().reshape((groups, (), inputs))?;
        let bias = whole.bias().map(|bias| bias.reshape((groups, ()))).transpose()?;
        let mut begin = 0_usize;
        let mut linears = Vec::with_capacity(N);
        for width in widths.map(to_usize) {
            let rows = weight.narrow(1, begin, width)?.reshape(((), inputs))?.copy()?;
            let bias = bias.as_ref().map(|bias| bias.narrow(1, begin, width)?.flatten_all());
            linears.push(Linear::new(rows, bias.transpose()?));
            begin += width;
        }
        Ok(linears.try_into().unwrap_or_else(|_| unreachable!("one projection for each width")))
    }
}
