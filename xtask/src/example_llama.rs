//! The example `llama` of `kv-candle` beside the program `kv`.
use anyhow::{Context, Result, bail, ensure};

use crate::{programs, shell};

/// Prompts that both programs continue.
const PROMPTS: [&str; 3] = ["Once upon a time", "Lily and Ben", "One day, a"];

/// Checks the text of the example against that of `kv generate`.
pub(crate) fn run() -> Result<()> {
    let (kv, llama) = (programs::plain("bin", "kv")?, programs::plain("example", "llama")?);
    for prompt in PROMPTS {
        let [generated, text] = [(&kv, Some("generate")), (&llama, None)].map(|(path, command)| {
            let mut program = shell::program(path);
            program.args(command).args(["--model", "models/stories260K", "--prompt", prompt]);
            program.args(["--max-new-tokens", "64"]);
            let output = program.output().with_context(|| shell::line(&program))?;
            ensure!(output.status.success(), "`{}` failed", shell::line(&program));
            ensure!(output.stderr.is_empty(), "`{}` writes errors", shell::line(&program));
            Ok(String::from_utf8_lossy(&output.stdout).into_owned())
        });
        // A blank line and the report follow the text of `kv generate`.
        let (generated, text) = (generated?, text?);
        if !generated.starts_with(&format!("{text}\n")) || text.len() < 150 {
            bail!("example llama writes {text:?}, `kv generate` {generated:?}");
        }
    }
    println!("example llama writes what `kv generate` does");
    Ok(())
}
