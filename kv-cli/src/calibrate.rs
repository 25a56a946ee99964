//! x
use crate::args::CalibrateArgs;
pub(crate) fn run(_args: &CalibrateArgs) -> anyhow::Result<()> {
    anyhow::bail!("x")
}
