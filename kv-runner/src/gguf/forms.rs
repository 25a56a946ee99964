//! What the converter of GGUF files does to the values of tensors, and how they are restored.
use candle_core::Tensor;

use crate::config::DeltaConfig;
use crate::num::to_usize;

/// What a converter has done to a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Same,
    /// The weights of a convolution lack the axis of inputs, of which a channel has one.
    Channels,
    /// Other axes.
    Flat,
    /// A matrix of one row may lack the axis of rows.
    Row,
    /// A decay itself, below 0, in place of the logarithm of its negative.
    Decay,
    /// The weights of a norm themselves, in place of what they have beyond one.
    Whole,
}

/// The order of the heads of V in a tensor of a gated delta rule.
///
/// Files of Hugging Face have the heads that share a head of K one after another. Those of some
/// architectures have the first head of each of these groups, then the second one of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Heads {
    /// As Hugging Face has them, or none at all.
    Same,
    /// Rows of heads in turns.
    Rows,
    /// Rows of heads in turns, behind those of all heads of Q and K.
    RowsBehindKeys,
    /// Columns of heads in turns.
    Columns,
}

impl Form {
    /// Returns the values as Hugging Face has them.
    pub(super) fn restore(self, tensor: &Tensor) -> candle_core::Result<Tensor> {
        match self {
            Self::Same => Ok(tensor.clone()),
            Self::Channels => tensor.unsqueeze(1),
            Self::Flat => tensor.flatten_all(),
            Self::Row => tensor.flatten_all()?.unsqueeze(0),
            Self::Decay => {
                let decays: Vec<f32> = tensor.flatten_all()?.to_vec1()?;
                if let Some(decay) = decays.iter().find(|decay| decay.is_nan() || **decay >= 0.0) {
                    candle_core::bail!("a decay of {decay}: a number below 0 is expected");
                }
                tensor.flatten_all()?.neg()?.log()
            }
            Self::Whole => tensor.affine(1.0, -1.0),
        }
    }
}

impl Heads {
    /// Returns the tensor with the heads of V in groups.
    pub(super) fn restore(self, tensor: &Tensor, of: &DeltaConfig) -> candle_core::Result<Tensor> {
        match self {
            Self::Same => Ok(tensor.clone()),
            Self::Rows => grouped(tensor, 0, of),
            Self::RowsBehindKeys => {
                let keys = to_usize(of.k_width).saturating_mul(2);
                let Some(values) = tensor.dim(0)?.checked_sub(keys) else {
                    candle_core::bail!("{:?}: {keys} rows of Q and K are expected", tensor.dims());
                };
                let values = grouped(&tensor.narrow(0, keys, values)?, 0, of)?;
                Tensor::cat(&[&tensor.narrow(0, 0, keys)?, &values], 0)
            }
            Self::Columns => grouped(tensor, 1, of),
        }
    }
}

/// Puts the heads of V, which lie along an axis in turns, into groups.
fn grouped(tensor: &Tensor, axis: usize, of: &DeltaConfig) -> candle_core::Result<Tensor> {
    let groups = to_usize(of.k_heads);
    let Some(heads) = to_usize(of.v_heads).checked_div(groups) else {
        candle_core::bail!("no heads of K");
    };
    let before: usize = tensor.dims().iter().take(axis).product();
    let turns = tensor.reshape((before, heads, groups, ()))?;
    turns.transpose(1, 2)?.reshape(tensor.shape())
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    const OF: DeltaConfig = DeltaConfig {
        k_heads: 2,
        v_heads: 6,
        k_dim: 1,
        v_dim: 2,
        kernel: 2,
        k_width: 2,
        v_width: 12,
        channels: 16,
        is_fused: false,
    };

    fn values(tensor: &Tensor) -> Vec<u32> {
        tensor.flatten_all().and_then(|flat| flat.to_vec1()).expect("values")
    }

    fn counted(shape: &[usize]) -> Tensor {
        let count = u32::try_from(shape.iter().product::<usize>()).expect("small");
        Tensor::arange(0, count, &Device::Cpu).and_then(|all| all.reshape(shape)).expect("a tensor")
    }

    #[test]
    fn heads_in_turns_are_put_into_groups() {
        let restored = |heads: Heads, shape: &[usize]| heads.restore(&counted(shape), &OF);
        // Head 2 * i + j of the file is head i of group j.
        let single = restored(Heads::Rows, &[6]).expect("heads");
        assert_eq!(values(&single), [0, 2, 4, 1, 3, 5]);
        let rows = restored(Heads::Rows, &[12, 1]).expect("rows");
        assert_eq!(rows.dims(), [12, 1]);
        assert_eq!(values(&rows), [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]);
        let behind = restored(Heads::RowsBehindKeys, &[16]).expect("rows");
        assert_eq!(values(&behind), [0, 1, 2, 3, 4, 5, 8, 9, 12, 13, 6, 7, 10, 11, 14, 15]);
        let columns = restored(Heads::Columns, &[2, 6]).expect("columns");
        assert_eq!(values(&columns), [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]);
        assert_eq!(values(&restored(Heads::Same, &[6]).expect("heads")), [0, 1, 2, 3, 4, 5]);
    }

    #[test]
    fn tensors_without_room_for_the_heads_are_refused() {
        for (heads, shape) in [
            (Heads::Rows, &[7][..]),
            (Heads::RowsBehindKeys, &[3]),
            (Heads::RowsBehindKeys, &[9]),
            (Heads::Columns, &[2, 5]),
        ] {
            assert!(heads.restore(&counted(shape), &OF).is_err(), "{heads:?} {shape:?}");
        }
    }
}
