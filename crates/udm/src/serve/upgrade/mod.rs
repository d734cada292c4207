//! `udm upgrade`: another program takes the place of a server, and clients stay connected.
//!
//! 1. *Start* (`hand_over`): the old server checks that all of its state can be handed over. It
//!    starts the new program with its own arguments and a socket as standard input. The new program
//!    starts its cores and says which formats of the state it can read. Until here nothing has
//!    changed.
//! 2. *Pause*: the old server accepts no connections, detaches its NBD clients
//!    (`udm_frontends::nbd::NbdHandover`) and machines, and removes its devices as in a shutdown.
//! 3. *Prepare* (`take_over`): the new program gets the state and all sockets, creates the devices
//!    and listens, but serves nothing yet.
//! 4. *Commit*: the old server lets go of everything and ends. The new one serves.
//!
//! If anything fails before the commit, the new program is ended, and the old server creates its
//! devices again and serves its clients. After the commit nothing of the old server is needed.
//!
//! `state` is the format, with its version; `channel` carries it.

mod channel;
mod hand_over;
mod state;
mod take_over;

pub(super) use hand_over::{RunningServer, UpgradeRequests, serve_upgrade_requests};
pub(super) use state::BlockDeviceState;
pub(super) use take_over::TakeOver;
