//! The file of a server: its devices at the start, and SIGHUP.

use super::shutdown::SighupStream;
use super::systemd;
use crate::log;
use crate::verbs::result_lines;
use anyhow::{Result, bail};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use udm_control::api::Reconfigured;
use udm_control::config::{self, ConfigReader, DesiredState};
use udm_control::verbs::{self, CancelToken};
use udm_control::{Registry, error::VerbError};

/// What a file said at the start, and how it is read again.
pub(super) type File = (DesiredState, ConfigReader);

/// How long changes may wait for requests in flight when a signal asked for them: nobody is there
/// to call them off.
const PATIENCE: Duration = Duration::from_secs(60);

/// Makes the devices of a file, beside those of the command line; the names of all that it wants.
/// What can't be made goes to the log, and the others are served: the next start, or `udm
/// reconfigure`, tries again.
pub(super) async fn start(
    registry: &Arc<Registry>,
    (wish, read): File,
    given: &[&str],
) -> Result<Vec<String>> {
    if let Some(twice) = wish.devices.iter().find(|wanted| given.contains(&wanted.name.as_str())) {
        bail!("{}: --device and the file have it both", twice.name);
    }
    registry.set_config_reader(read);
    let done = config::create_declared(registry, &wish).await?;
    let failed = done.changes.iter().filter_map(|change| Some((&change.name, change.error.as_ref()?)));
    failed.for_each(|(name, why)| log::say(format!("udm: {name}: {why}\n")));
    Ok(wish.devices.into_iter().map(|wanted| wanted.name).collect())
}

/// Applies the file at each SIGHUP; what was done goes to the log.
pub(super) async fn reload_on_sighup(hangups: &SighupStream, registry: &Arc<Registry>) -> Infallible {
    loop {
        hangups.next().await;
        systemd::reloading();
        let cancel_token = CancelToken::default();
        let (called, on) = (cancel_token.clone(), Arc::clone(registry));
        let mut change =
            tokio::task::spawn_blocking(move || verbs::wait(config::reconfigure(&on, false, &called)));
        let done = tokio::select! {
            done = &mut change => done,
            () = tokio::time::sleep(PATIENCE) => {
                cancel_token.cancel(verbs::interrupted(&format!("not done within {} s", PATIENCE.as_secs())));
                change.await
            }
        };
        match done {
            Ok(done) => say(&done),
            Err(error) => tracing::error!("reconfigure: {error}"),
        }
        systemd::ready(registry.all().len());
    }
}

/// Makes the devices that waited for a snapshot as those can be attached; that goes to the log.
pub(super) async fn create_when_attachable(registry: &Arc<Registry>) -> Infallible {
    let made =
        |done: &Reconfigured| result_lines(done).0.iter().for_each(|line| log::say(format!("udm: {line}\n")));
    config::wait_for_snapshots(registry, made).await;
    std::future::pending().await
}

fn say(done: &Result<Reconfigured, VerbError>) {
    match done {
        Ok(done) => {
            let (made, refused) = result_lines(done);
            made.iter().chain(&refused).for_each(|line| log::say(format!("udm: {line}\n")));
        }
        Err(error) => log::say(format!("udm: {error}\n")),
    }
}
