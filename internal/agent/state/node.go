package state

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/egress"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/statefile"
)

// Node is the identity of this node; it lasts as long as the state directory.
type Node struct {
	disk    statefile.Disk
	path    string
	damages *statefile.Damages
	lost    bool // the file of gateway prefixes was damaged

	mu       sync.Mutex
	file     NodeFile
	gateways gatewaysFile
	reserved reservedFile

	messages atomic.Uint32 // since this start
}

const (
	NodeFileName     = "node.json"
	gatewaysFileName = "gateways.json" // a separate file: builds without gateway prefixes read node.json
)

// Folders of the state directory.
const (
	TenantsFolder  = "tenants"
	PoliciesFolder = "policies"
)

// Version is the format version of the agent's files, raised with incompatible changes. A build with a lower
// version refuses the files, so a downgrade needs an empty state directory.
const Version = 1

type NodeFile struct {
	Version int          `json:"version"`
	Name    string       `json:"name"`
	UUID    string       `json:"uuid"`
	Cluster *clusterFile `json:"cluster,omitempty"` // nil before the first registration
	Starts  uint32       `json:"starts,omitempty"`  // number of starts of the agent
}

// clusterFile is fixed by the first registration.
type clusterFile struct {
	UUID    string       `json:"uuid"`
	Prefix  netip.Prefix `json:"prefix"`
	Base    netip.Prefix `json:"basePrefix"`
	Private netip.Prefix `json:"privatePrefix"`
}

// gatewaysFile is the rest of the plan. A node that joined before gateway prefixes existed has none until it registers
// again.
type gatewaysFile struct {
	Version int          `json:"version"`
	V4      netip.Prefix `json:"v4,omitzero"`
	V6      netip.Prefix `json:"v6,omitzero"`
}

// Membership is fixed by the first registration: the cluster, its address plan, and this node's /64.
type Membership struct {
	ClusterUUID string
	Prefix      netip.Prefix
	Plan        address.Plan
}

// OpenNode reads <dir>/node.json, or creates it with a new UUID, and increments its number of starts.
func OpenNode(dir, name string) (*Node, error) { return OpenNodeOn(statefile.Disk{}, dir, name) }

// OpenNodeOn is OpenNode on another disk.
func OpenNodeOn(disk statefile.Disk, dir, name string) (*Node, error) {
	return OpenNodeWith(disk, nil, dir, name)
}

// OpenNodeWith is OpenNodeOn, and sets a damaged file of gateway prefixes aside. node.json cannot be replaced.
func OpenNodeWith(disk statefile.Disk, damages *statefile.Damages, dir, name string) (*Node, error) {
	n := &Node{disk: disk, path: filepath.Join(dir, NodeFileName), damages: damages}
	err := disk.Read(n.path, Version, &n.file)
	fresh := errors.Is(err, fs.ErrNotExist)
	if fresh {
		if err := n.checkLost(dir); err != nil {
			return nil, err
		}
		n.file = NodeFile{Version: Version, Name: name, UUID: join.NewUUID()}
	} else if err != nil {
		return nil, err
	}
	if err := n.file.validate(); err != nil {
		return nil, &statefile.CorruptError{Path: n.path, Err: err}
	}
	if err := n.readGateways(); err != nil {
		n.gateways, n.lost = gatewaysFile{}, true
		if err := damages.SetAside(err, "the agent requests the prefixes from the orchestrator again; until it has "+
			"them and is restarted, services and publications cannot be reached through this node"); err != nil {
			return nil, err
		}
	}
	if err := n.readReserved(); err != nil {
		return nil, err
	}
	renamed := n.file.Name != name
	if !renamed || n.file.Cluster == nil { // the name is not registered yet, as far as known
		n.file.Name = name
		n.file.Starts++
		if err := disk.Write(n.path, n.file, 0o600); err != nil && (fresh || renamed) {
			return nil, err
		}
		// Otherwise two starts share a number: a full disk must not prevent a start.
		return n, nil
	}
	return nil, fmt.Errorf(
		"%s belongs to node %s, not to %s\n  nothing was changed; keep the name, or delete the node and use an empty "+
			"--state-dir",
		dir,
		n.file.Name,
		name,
	)
}

// checkLost refuses to create a new identity if the directory has state of a previous one.
func (n *Node) checkLost(dir string) error {
	witness := ""
	err := n.disk.Walk(dir, func(path string, entry fs.DirEntry) {
		if entry.Name() != statefile.LockFile && !statefile.IsUnfinished(entry.Name()) && IsState(topOf(dir, path)) {
			witness = path
		}
	})
	if err == nil && witness != "" {
		err = &statefile.CorruptError{Path: n.path, Err: fmt.Errorf("it is missing, though %s is there", witness)}
	}
	return err
}

// topOf is the first path element of path below dir.
func topOf(dir, path string) string {
	below, _ := filepath.Rel(dir, path)
	top, _, _ := strings.Cut(below, string(filepath.Separator))
	return top
}

func (n *Node) gatewaysPath() string { return filepath.Join(n.Dir(), gatewaysFileName) }

func (n *Node) readGateways() error {
	path := n.gatewaysPath()
	err := n.disk.Read(path, Version, &n.gateways)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if m, joined := n.Membership(); joined {
		if err := m.validate(); err != nil {
			return &statefile.CorruptError{Path: path, Err: err}
		}
	}
	return nil
}

func (f NodeFile) validate() error {
	if f.Name == "" || f.UUID == "" {
		return errors.New("name or UUID is missing")
	}
	if f.Cluster == nil {
		return nil
	}
	return f.Cluster.membership().validate()
}

func (c *clusterFile) membership() Membership {
	return Membership{c.UUID, c.Prefix, address.Plan{Base: c.Base, Private: c.Private}}
}

func (m Membership) validate() error {
	if m.ClusterUUID == "" {
		return errors.New("the cluster's UUID is missing")
	}
	if err := m.Plan.Validate(); err != nil {
		return err
	}
	if !m.Plan.ContainsNode(m.Prefix) {
		return fmt.Errorf("node prefix %v is not a /64 in the base prefix %v", m.Prefix, m.Plan.Base)
	}
	return nil
}

// Sequence numbers this node's messages to the orchestrator. The numbers increase, also across restarts.
func (n *Node) Sequence() uint64 {
	return uint64(n.file.Starts)<<32 | uint64(n.messages.Add(1))
}

// Dir is the state directory.
func (n *Node) Dir() string { return filepath.Dir(n.path) }

func (n *Node) Name() string { return n.file.Name }
func (n *Node) UUID() string { return n.file.UUID }

// Membership returns false before the first registration.
func (n *Node) Membership() (Membership, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.file.Cluster == nil {
		return Membership{}, false
	}
	return n.membership(), true
}

// membership is the Membership of a joined node. The caller holds the lock.
func (n *Node) membership() Membership {
	m := n.file.Cluster.membership()
	m.Plan.Gateway4, m.Plan.Gateway6 = n.gateways.V4, n.gateways.V6
	m.Plan.Identifiers, m.Plan.Egress = n.reserved.Identifiers, n.reserved.Egress
	return m
}

// Join stores the first registration's answer, and refuses a different answer later.
func (n *Node) Join(m Membership) error {
	if err := m.validate(); err != nil {
		return fmt.Errorf("the orchestrator's answer is invalid: %w", err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	plan, has := &m.Plan, n.gateways
	plan.Identifiers = plan.Identifiers || n.reserved.Identifiers
	if !plan.Gateway4.IsValid() && !plan.Gateway6.IsValid() { // an older orchestrator does not send them
		plan.Gateway4, plan.Gateway6 = has.V4, has.V6
	}
	if !plan.Egress.IsValid() {
		plan.Egress = n.reserved.Egress
	}
	if n.file.Cluster != nil {
		held := n.membership()
		held.Plan.Identifiers = plan.Identifiers
		if !held.Plan.Egress.IsValid() { // the cluster may get it later
			held.Plan.Egress = plan.Egress
		}
		if has.Version == 0 { // not received before
			held.Plan.Gateway4, held.Plan.Gateway6 = plan.Gateway4, plan.Gateway6
		}
		if held != m {
			return fmt.Errorf(
				"the orchestrator answers cluster %s, prefix %v, plan %v; this node has %s, %v, %v\n  nothing was "+
					"changed and containers keep their addresses; use the right orchestrator, or restore its data",
				m.ClusterUUID,
				m.Prefix,
				m.Plan,
				held.ClusterUUID,
				held.Prefix,
				held.Plan,
			)
		}
	}
	if err := cmp.Or(n.joinReserved(m), n.joinGateways(m)); err != nil || n.file.Cluster != nil {
		return err
	}
	f := n.file
	f.Cluster = &clusterFile{m.ClusterUUID, m.Prefix, m.Plan.Base, m.Plan.Private}
	if err := n.disk.Write(n.path, f, 0o600); err != nil {
		return err
	}
	n.file = f
	return nil
}

// LostGateways reports whether the gateway prefixes are unknown because their file was damaged.
func (n *Node) LostGateways() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.lost
}

// joinGateways stores the gateway prefixes before the membership: until that is stored, nothing is fixed.
func (n *Node) joinGateways(m Membership) error {
	next := gatewaysFile{Version, m.Plan.Gateway4, m.Plan.Gateway6}
	if next == n.gateways || !next.V4.IsValid() && !next.V6.IsValid() {
		return nil
	}
	if err := n.disk.Write(n.gatewaysPath(), next, 0o600); err != nil {
		return err
	}
	n.gateways, n.lost = next, false
	n.damages.Replaced(n.gatewaysPath())
	return nil
}

// IsState reports whether a file or folder name in the state directory is the agent's.
func IsState(name string) bool {
	if original, damaged := statefile.DamagedName(name); damaged {
		name = original
	}
	return slices.Contains(
		append(
			endpoint.Folders(),
			endpoint.LastIDFile,
			egress.Folder,
			NodeFileName,
			gatewaysFileName,
			reservedFileName,
			TenantsFolder,
			PoliciesFolder,
			join.MemberFile,
			statefile.LockFile,
		),
		name,
	) ||
		statefile.IsUnfinished(name)
}
