package state

import (
	"errors"
	"io/fs"
	"net/netip"
	"path/filepath"

	"pilaster.io/pilaster/internal/statefile"
)

// reservedFileName is a separate file: builds without it read the others.
const reservedFileName = "reserved.json"

// reservedFile has what the cluster reserves since it was created.
type reservedFile struct {
	Version     int          `json:"version"`
	Identifiers bool         `json:"identifiers,omitempty"` // see address.Plan
	Egress      netip.Prefix `json:"egressPrefix,omitzero"` // see address.Plan
}

// Peek reads the membership of a node from its folder as far as it can be read, without its gateway prefixes, and
// changes nothing; false if it has not joined.
func Peek(dir string) (Membership, bool) {
	var node NodeFile
	if statefile.Read(filepath.Join(dir, NodeFileName), Version, &node) != nil || node.Cluster == nil {
		return Membership{}, false
	}
	m := node.Cluster.membership()
	var reserved reservedFile
	if statefile.Read(filepath.Join(dir, reservedFileName), Version, &reserved) == nil {
		with := m
		with.Plan.Identifiers, with.Plan.Egress = reserved.Identifiers, reserved.Egress
		if with.validate() == nil {
			m = with
		}
	}
	return m, true
}

func (n *Node) reservedPath() string { return filepath.Join(n.Dir(), reservedFileName) }

// readReserved reads the file; without it, nothing is reserved. After damage this is so until the next registration.
func (n *Node) readReserved() error {
	err := n.disk.Read(n.reservedPath(), Version, &n.reserved)
	if m, joined := n.Membership(); err == nil && joined {
		if invalid := m.validate(); invalid != nil {
			err = &statefile.CorruptError{Path: n.reservedPath(), Err: invalid}
		}
	}
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	n.reserved = reservedFile{}
	return n.damages.SetAside(err, "the agent requests its content from the orchestrator again; until it has that, "+
		"packets of other hosts and interfaces may have addresses that are reserved for containers, and new "+
		"containers get no egress addresses of the cluster's egress prefix")
}

// joinReserved stores what is reserved. A reservation stays, because an older orchestrator does not send it.
func (n *Node) joinReserved(m Membership) error {
	return n.reserve(m.Plan.Identifiers, m.Plan.Egress)
}

// Reserve stores that the prefix of identifiers is reserved. Membership then says so.
func (n *Node) Reserve() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.reserve(true, netip.Prefix{})
}

func (n *Node) reserve(identifiers bool, egress netip.Prefix) error {
	next := reservedFile{Version, n.reserved.Identifiers || identifiers, n.reserved.Egress}
	if egress.IsValid() {
		next.Egress = egress
	}
	if next == n.reserved || next == (reservedFile{Version: Version}) {
		return nil
	}
	if err := n.disk.Write(n.reservedPath(), next, 0o600); err != nil {
		return err
	}
	n.reserved = next
	n.damages.Replaced(n.reservedPath())
	return nil
}
