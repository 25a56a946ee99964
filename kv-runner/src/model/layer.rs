//! The weights of one layer, under the names of each architecture.
use candle_core::Tensor;

use super::attention::Attention;
use super::delta::Delta;
use super::mamba2::Mamba2;
use super::mlp::Mlp;
use super::part::Part;
use super::short_conv::ShortConv;
use crate::config::{LayerKind, ModelConfig, Recurrence};
use crate::error::Error;
use crate::weights::Weights;

/// One layer; a norm that its architecture lacks is `None`.
#[derive(Debug)]
pub(super) struct Layer {
    /// Norms before and after the mixer.
    pub(super) mixer_norm: Option<Tensor>,
    pub(super) mixer_out_norm: Option<Tensor>,
    pub(super) mixer: Mixer,
    /// Norms before and after the MLP.
    pub(super) mlp_norm: Option<Tensor>,
    pub(super) mlp_out_norm: Option<Tensor>,
    pub(super) mlp: Mlp,
}

/// The part of a layer that reads other tokens than its own.
#[derive(Debug)]
pub(super) enum Mixer {
    Attention(Attention),
    Delta(Delta),
    ShortConv(ShortConv),
    Mamba2(Mamba2),
}

impl Layer {
    pub(super) fn build(
        config: &ModelConfig,
        weights: &mut Weights,
        kind: LayerKind,
        layer: u16,
    ) -> Result<Self, Error> {
        let hidden = config.hidden;
        let architecture = config.architecture;
        let norms_less_one = architecture.norms_less_one();
        let mut part = Part { weights, layer, norms_less_one };
        let (before, after) = (!architecture.norms_outputs(), architecture.norms_outputs());
        let names = architecture.weights();
        Ok(Self {
            mixer_norm: part.norm_if(before, names.mixer_norm, hidden)?,
            // The same name for a norm at another place.
            mixer_out_norm: part.norm_if(after, names.mlp_norm, hidden)?,
            mixer: Mixer::build(config, &mut part, kind)?,
            mlp_norm: part.norm_if(before, names.mlp_norm, hidden)?,
            mlp_out_norm: part.norm_if(after, "post_feedforward_layernorm", hidden)?,
            mlp: Mlp::build(config, &mut part)?,
        })
    }
}

impl Mixer {
    fn build(config: &ModelConfig, part: &mut Part<'_>, kind: LayerKind) -> Result<Self, Error> {
        let recurrence = config.recurrence.as_ref().filter(|_| !kind.attends);
        Ok(match recurrence {
            None => Self::Attention(Attention::build(config, part, kind)?),
            Some(Recurrence::Delta(of)) => Self::Delta(Delta::build(config, part, *of)?),
            Some(Recurrence::ShortConv(of)) => {
                Self::ShortConv(ShortConv::build(config, part, *of)?)
            }
            Some(Recurrence::Mamba2(of)) => Self::Mamba2(Mamba2::build(config, part, *of)?),
        })
    }
}
