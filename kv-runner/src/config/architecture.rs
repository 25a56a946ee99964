//! The architectures that a decoder runs, and what distinguishes them.
use std::fmt;

/// Architectures that [`Decoder`](crate::Decoder) runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Architecture {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
    Phi3,
    Olmo2,
    Granite,
    SmolLm3,
    Qwen35,
    Qwen3Next,
    Lfm2,
    GraniteHybrid,
}

impl Architecture {
    /// All architectures, with their `model_type` and the class that an entry of `architectures`
    /// names.
    pub(super) const ALL: [(Self, &str, &str); 12] = [
        (Self::Llama, "llama", "LlamaForCausalLM"),
        (Self::Mistral, "mistral", "MistralForCausalLM"),
        (Self::Qwen2, "qwen2", "Qwen2ForCausalLM"),
        (Self::Qwen3, "qwen3", "Qwen3ForCausalLM"),
        (Self::Phi3, "phi3", "Phi3ForCausalLM"),
        (Self::Olmo2, "olmo2", "Olmo2ForCausalLM"),
        (Self::Granite, "granite", "GraniteForCausalLM"),
        (Self::SmolLm3, "smollm3", "SmolLM3ForCausalLM"),
        (Self::Qwen35, "qwen3_5_text", "Qwen3_5ForCausalLM"),
        (Self::Qwen3Next, "qwen3_next", "Qwen3NextForCausalLM"),
        (Self::Lfm2, "lfm2", "Lfm2ForCausalLM"),
        (Self::GraniteHybrid, "granitemoehybrid", "GraniteMoeHybridForCausalLM"),
    ];

    /// The supported architectures, for errors.
    pub(super) const NAMES: &str = "llama, mistral, qwen2, qwen3, phi3, olmo2, granite, smollm3, \
                                    qwen3_5_text, qwen3_next, lfm2 or granitemoehybrid";

    /// Returns the architecture of a `model_type`.
    pub(crate) fn of_model_type(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, model_type, _)| *model_type == name).map(|(known, ..)| *known)
    }

    /// Returns the architecture of an entry of `architectures`.
    pub(super) fn of_class(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(.., class)| *class == name).map(|(known, ..)| *known)
    }

    /// Returns its `model_type`.
    pub(crate) fn name(self) -> &'static str {
        let known = Self::ALL.iter().find(|(known, ..)| *known == self);
        known.map_or("", |(_, model_type, _)| model_type)
    }

    /// Returns whether norms follow attention and MLP instead of preceding them.
    pub(crate) fn norms_outputs(self) -> bool {
        self == Self::Olmo2
    }

    /// Returns whether Q, K and V come from one matrix, and gate and up from another.
    pub(crate) fn fuses_projections(self) -> bool {
        self == Self::Phi3
    }

    /// Returns the norm of Q and K before their rotation.
    pub(crate) fn qk_norm(self) -> Option<QkNorm> {
        match self {
            Self::Qwen3 | Self::Qwen35 | Self::Qwen3Next | Self::Lfm2 => Some(QkNorm::Head),
            Self::Olmo2 => Some(QkNorm::Projection),
            _ => None,
        }
    }

    /// Returns whether files keep the weights of norms less one, those of a recurrence excepted.
    pub(crate) fn norms_less_one(self) -> bool {
        matches!(self, Self::Qwen35 | Self::Qwen3Next)
    }

    /// Returns whether the output of attention is gated, by rows that lie beside those of Q.
    pub(crate) fn gates_attention(self) -> bool {
        matches!(self, Self::Qwen35 | Self::Qwen3Next)
    }

    /// Returns whether the weights of all experts are in one tensor, and the shared one, an MLP as
    /// without experts, has no gate.
    pub(crate) fn stacks_experts(self) -> bool {
        self == Self::GraniteHybrid
    }

    /// Returns the names in a list of layers of those with a recurrent state, none if all layers
    /// attend.
    pub(crate) fn recurrent_layers(self) -> &'static [&'static str] {
        match self {
            Self::Qwen35 | Self::Qwen3Next => &["linear_attention"],
            Self::Lfm2 => &["conv"],
            Self::GraniteHybrid => &["linear_attention", "mamba"],
            _ => &[],
        }
    }

    /// Returns the names of weights.
    pub(crate) fn weights(self) -> Names {
        match self {
            Self::Phi3 => Names { gate_up: Some("mlp.gate_up_proj"), ..USUAL },
            Self::Lfm2 => LFM2,
            Self::GraniteHybrid => Names {
                gate_up: Some("shared_mlp.input_linear"),
                down: "shared_mlp.output_linear",
                ..USUAL
            },
            _ => USUAL,
        }
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The extent of a norm of Q or K.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QkNorm {
    /// The row of one head, with weights that all heads share.
    Head,
    /// The rows of all heads.
    Projection,
}

/// Names of the weights of a layer that differ between architectures, and of the last norm.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Names {
    /// Norms before attention, or a recurrence, and before the MLP.
    pub(crate) mixer_norm: &'static str,
    pub(crate) mlp_norm: &'static str,
    pub(crate) q_norm: &'static str,
    pub(crate) k_norm: &'static str,
    pub(crate) attention_out: &'static str,
    pub(crate) gate: &'static str,
    pub(crate) up: &'static str,
    pub(crate) down: &'static str,
    /// One matrix with the rows of gate and up.
    pub(crate) gate_up: Option<&'static str>,
    pub(crate) last_norm: &'static str,
}

const USUAL: Names = Names {
    mixer_norm: "input_layernorm",
    mlp_norm: "post_attention_layernorm",
    q_norm: "self_attn.q_norm",
    k_norm: "self_attn.k_norm",
    attention_out: "self_attn.o_proj",
    gate: "mlp.gate_proj",
    up: "mlp.up_proj",
    down: "mlp.down_proj",
    gate_up: None,
    last_norm: "model.norm.weight",
};

const LFM2: Names = Names {
    mixer_norm: "operator_norm",
    mlp_norm: "ffn_norm",
    q_norm: "self_attn.q_layernorm",
    k_norm: "self_attn.k_layernorm",
    attention_out: "self_attn.out_proj",
    gate: "feed_forward.w1",
    up: "feed_forward.w3",
    down: "feed_forward.w2",
    gate_up: None,
    last_norm: "model.embedding_norm.weight",
};
