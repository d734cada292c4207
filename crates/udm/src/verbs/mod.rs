//! dmsetup's verbs, against a running `udm serve`.
//!
//! Contract: standard output is dmsetup's, byte for byte, or JSON with `--json`. A failure is an
//! error that `main` prints.

pub mod change;
pub mod events;
pub mod generate;
pub mod info;
mod manual;
pub mod power;
pub mod queue;
pub mod reconfigure;
pub mod show;
pub mod tree;
pub mod wait;

pub use change::{current_dir, read_bounded, read_table};
pub use info::describe;
pub use reconfigure::result_lines;
pub use show::{all_devices, all_tables, table_lines};
pub use tree::{DeviceTree, TreeGlyphs, TreeStyle, deps_line};

use udm_control::client::ClientError;
use udm_control::error::TextPosition;

/// Converts an error of the client. If a table is at fault, the text shows its line.
pub fn explain(error: ClientError, table: Option<&str>) -> anyhow::Error {
    let refused = match &error {
        ClientError::Refused(refused) => refused,
        ClientError::Unreachable { source, .. } => {
            return anyhow::anyhow!(
                "{error}: {source} (start it, or name its control socket with --socket or $UDM_SOCKET)"
            );
        }
        ClientError::Broken { .. } => return error.into(),
    };
    let number = |n: Option<u64>| usize::try_from(n?).ok();
    let position = number(refused.line).zip(number(refused.column)).map(|(line, column)| TextPosition {
        line,
        column,
        width: number(refused.width).unwrap_or(1),
    });
    match table.zip(position).and_then(|(table, position)| position.mark(table)) {
        Some(mark) => anyhow::anyhow!("{error}\n{mark}"),
        None => error.into(),
    }
}
