package store

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/orchestrator/pki"
)

// Registration is a node's report about itself.
type Registration struct {
	Node    pki.Node
	Prefix  netip.Prefix // chosen by the administrator or allocated before; zero requests a new one
	Uplinks []netip.Addr // next hops for the fabric, best first
	Version string       // of the agent
	Edge    bool         // it is an Edge Switch
	Gateway bool         // it has a gateway

	Enforces []string // networks on which it enforces policies, sorted
	Form     string   // of its packets on the fabric; empty if it has no network with a choice

	Egress     bool   // its containers can reach hosts outside, and it can be an egress gateway
	Offloads   bool   // it can be a backend and a frontend of offloads
	MTUReserve uint32 // bytes by which its containers' MTU is smaller than tunnels allow
	Rack       string // may be empty

	Instance string // identifies the machine from boot to shutdown

	// The tenants and apps that the node uses already; tenants without keys.
	Tenants []*pilasterv1.Tenant
	Apps    []*pilasterv1.App

	Mappings []*pilasterv1.Mapping // that the node has

	Published uint32 // highest index that its gateway publishes; 0 for none
}

// maxJump is the highest distance above the mark at which a claimed prefix or tenant id raises the mark. At a larger
// distance, no orchestrator that lost its state has allocated the number: an administrator chose the prefix, or the
// node invented the id. A raised mark would then waste all numbers below. Allocation skips claimed numbers in any case.
const maxJump = 1 << 16

// maxReclaimed is how many tenant ids a node may claim until it is deleted.
const maxReclaimed = 2 * maxJump

// maxAppJump is maxJump for apps, of which a tenant has at most 65,279.
const maxAppJump = 1 << 12

// Admit reports whether a node with this name and UUID may have a certificate.
func (s *Store) Admit(ctx context.Context, n pki.Node) error {
	return s.change(ctx, func(t *txn) error {
		_, err := t.identify(n)
		return err
	})
}

// Readmit reports whether a node whose certificate is outside its validity period may have a new one. The node must be
// registered and not deleted, and no other machine may be connected with its identity.
func (s *Store) Readmit(ctx context.Context, n pki.Node, instance string) error {
	return s.change(ctx, func(t *txn) error {
		record, err := t.identify(n)
		if err != nil {
			return err
		}
		if record == nil {
			return refuse(
				Refused,
				"node %s has no valid certificate and is not registered; give its agent the join token with "+
					"--token-file",
				n.Name,
			)
		}
		_, err = t.session(n.Name, instance)
		return err
	})
}

// nodeKeys returns the keys that decide whether a node may call.
func nodeKeys(n pki.Node) []string {
	return []string{dirDeleted + n.UUID, dirUUIDs + n.UUID, dirNodes + n.Name, dirSessions + n.Name}
}

// identify returns the record of a node, nil for a new node, or an error if the node is refused.
func (t *txn) identify(n pki.Node) (*pilasterv1.Node, error) {
	if err := CheckNode(n.Name, n.UUID); err != nil {
		return nil, err
	}
	if err := t.fetch(nodeKeys(n)...); err != nil {
		return nil, err
	}
	was, err := t.get(dirDeleted + n.UUID)
	if err != nil {
		return nil, err
	}
	if was != "" {
		return nil, refuse(
			Refused,
			"this machine was node %s until it was deleted; to let it join as a new node, remove its endpoints and "+
				"empty its state directory",
			was,
		)
	}
	has, err := t.get(dirUUIDs + n.UUID)
	if err != nil {
		return nil, err
	}
	if has != "" && has != n.Name {
		return nil, refuse(
			Refused,
			"this machine is node %s already and cannot also be %s; keep the name, or run `pilaster node delete %s` "+
				"and empty its state directory",
			has,
			n.Name,
			has,
		)
	}
	record := new(pilasterv1.Node)
	found, err := t.load(dirNodes+n.Name, record)
	switch {
	case err != nil:
		return nil, err
	case !found:
		return nil, nil
	case record.Uuid != n.UUID:
		return nil, refuse(
			Refused,
			"node name %s belongs to the machine with UUID %s; choose another with --node-name, or run `pilaster node "+
				"delete %s` if that machine is gone",
			n.Name,
			record.Uuid,
			n.Name,
		)
	}
	return record, nil
}

// Register creates or updates a node's record and reclaims the ids and prefixes that the node uses. If it refuses, it
// writes nothing. A node may report its state in several calls; earlier calls then remain in effect.
func (s *Store) Register(ctx context.Context, r Registration) (*pilasterv1.Node, error) {
	if r.Prefix.IsValid() && !s.cluster.Plan.ContainsNode(r.Prefix) {
		return nil, refuse(
			Invalid,
			"node prefix %v is not a /64 inside the base prefix %v; nothing was changed",
			r.Prefix,
			s.cluster.Plan.Base,
		)
	}
	var node *pilasterv1.Node
	keys := append(nodeKeys(r.Node), r.heldKeys()...)
	decide := func(t *txn) (err error) {
		if err := t.fetch(keys...); err != nil {
			return err
		}
		if node, err = s.register(t, r); err != nil {
			return err
		}
		return s.reclaim(t, node, r)
	}
	estimate := weight{} // many nodes that register at once are usually known, and nothing changes
	if !r.Prefix.IsValid() {
		estimate = weight{writes: 4, compares: 7, bytes: 1024} // a new node: record, UUID, prefix and mark
		keys = append(keys, keyCluster)
	}
	err := s.changeQueued(ctx, decide, estimate, keys...)
	return node, err
}

func (s *Store) register(t *txn, r Registration) (*pilasterv1.Node, error) {
	node, err := t.identify(r.Node)
	if err != nil {
		return nil, err
	}
	if _, err := t.session(r.Node.Name, r.Instance); err != nil {
		return nil, err
	}
	isNew := node == nil
	switch {
	case isNew:
		prefix, err := s.allocateNodePrefix(t, r)
		if err != nil {
			return nil, err
		}
		node = &pilasterv1.Node{
			Name:       r.Node.Name,
			Uuid:       r.Node.UUID,
			Prefix:     prefix.String(),
			Registered: timestamppb.New(time.Now()),
		}
		if node.Edge = r.Edge; node.Edge {
			if err := t.setEdge(node.Name); err != nil {
				return nil, err
			}
		}
		t.put(dirUUIDs+node.Uuid, node.Name)
	case r.Prefix.IsValid() && r.Prefix.String() != node.Prefix:
		return nil, refuse(
			Refused,
			"node %s has prefix %s and cannot change to %v; nothing was changed: keep it, or run `pilaster node "+
				"delete %s` and empty its state directory",
			node.Name,
			node.Prefix,
			r.Prefix,
			node.Name,
		)
	case r.Edge != node.Edge:
		return nil, refuse(
			Refused,
			"node %s joined %s and cannot change; nothing was changed: start its agent as before, or run `pilaster "+
				"node delete %s` and empty its state directory",
			node.Name,
			map[bool]string{true: "with --edge", false: "without --edge"}[node.Edge],
			node.Name,
		)
	}
	var uplinks []string
	for _, a := range r.Uplinks {
		uplinks = append(uplinks, a.String())
	}
	if !isNew && node.Version == r.Version && slices.Equal(node.UplinkAddresses, uplinks) &&
		node.Gateway == r.Gateway &&
		slices.Equal(node.Enforces, r.Enforces) && node.Form == r.Form && node.Offloads == r.Offloads &&
		node.MtuReserve == r.MTUReserve && node.Rack == r.Rack && node.Egress == r.Egress {
		return node, nil
	}
	node.Version, node.UplinkAddresses, node.Gateway, node.Enforces = r.Version, uplinks, r.Gateway, r.Enforces
	node.Form, node.Offloads, node.MtuReserve, node.Rack = r.Form, r.Offloads, r.MTUReserve, r.Rack
	node.Egress = r.Egress
	return node, t.save(dirNodes+node.Name, node)
}

// allocateNodePrefix claims the prefix that a new node requests, or the next free one.
func (s *Store) allocateNodePrefix(t *txn, r Registration) (netip.Prefix, error) {
	mark, err := t.mark(keyPrefixMark)
	if err != nil {
		return netip.Prefix{}, err
	}
	plan, err := t.plan()
	if err != nil {
		return netip.Prefix{}, err
	}
	if r.Prefix.IsValid() {
		if err := hasEgressNode(plan, r.Prefix); err != nil {
			return netip.Prefix{}, refuse(Refused, "%v; nothing was changed: choose another with --node-prefix", err)
		}
		if owner, err := t.get(dirPrefixes + r.Prefix.String()); err != nil {
			return netip.Prefix{}, err
		} else if owner != "" && owner != r.Node.UUID {
			return netip.Prefix{}, refuse(Refused, "prefix %v belongs or belonged to the node with UUID %s and is "+
				"never reused; nothing was changed: choose another with --node-prefix", r.Prefix, owner)
		}
		if n := plan.NodeNumber(r.Prefix); n >= mark && n-mark < maxJump {
			t.setMark(keyPrefixMark, n+1)
		}
		t.put(dirPrefixes+r.Prefix.String(), r.Node.UUID)
		return r.Prefix, nil
	}
	for n := mark; n < egressNodes(plan); n++ {
		prefix := plan.Node(n)
		owner, err := s.owner(t, n)
		if err != nil {
			return netip.Prefix{}, err
		}
		if owner == "" {
			t.setMark(keyPrefixMark, n+1)
			t.put(dirPrefixes+prefix.String(), r.Node.UUID)
			return prefix, nil
		}
	}
	if nodes := egressNodes(plan); nodes < plan.Nodes() {
		return netip.Prefix{}, refuse(
			Full,
			"all %d nodes that have a /64 in the egress prefix %v have been registered, and prefixes are never reused",
			nodes,
			plan.Egress,
		)
	}
	return netip.Prefix{}, refuse(
		Full,
		"all %d node prefixes of %v have been allocated, and prefixes are never reused",
		plan.Nodes(),
		plan.Base,
	)
}

// ownersAhead is the number of prefixes per read: nodes that register in one batch receive consecutive prefixes.
const ownersAhead = 32

// owner returns the UUID of the node that has or had a prefix.
func (s *Store) owner(t *txn, n uint64) (string, error) {
	plan := s.cluster.Plan
	key := func(n uint64) string { return dirPrefixes + plan.Node(n).String() }
	if _, known := t.readings[key(n)]; !known {
		var ahead []string
		for i := n; i < min(n+ownersAhead, plan.Nodes()); i++ {
			ahead = append(ahead, key(i))
		}
		if err := t.fetch(ahead...); err != nil {
			return "", err
		}
	}
	return t.get(key(n))
}

// mark returns the lowest number that was never allocated. 0 is never allocated: a zero in an address means "none".
func (t *txn) mark(key string) (uint64, error) {
	value, err := t.get(key)
	if err != nil || value == "" {
		return 1, err
	}
	return strconv.ParseUint(value, 10, 64)
}

func (t *txn) setMark(key string, n uint64) { t.put(key, strconv.FormatUint(n, 10)) }

// errParts reports that a change that must be one transaction does not fit into one.
var errParts = errors.New("this takes more than one transaction")

// DeleteNode deletes a node. The claim on its prefix remains, and its UUID cannot register again. Without force,
// DeleteNode refuses to delete a connected node. force is for a machine that keeps a stream open to prevent the
// deletion.
func (s *Store) DeleteNode(ctx context.Context, name string, force bool) error {
	err := s.change(ctx, func(t *txn) error {
		if err := s.deleteNode(t, name, force); err != nil {
			return err
		}
		if !t.weight().fits(t.maxOps) {
			return errParts
		}
		return nil
	})
	if !errors.Is(err, errParts) {
		return err
	}
	// The first transaction shuts the machine out, so that its records no longer change. The last transaction deletes
	// the name, so an interrupted deletion can be repeated.
	err = s.change(ctx, func(t *txn) error {
		_, _, err := t.shutOut(name, force)
		return err
	})
	if err != nil {
		return err
	}
	return s.change(ctx, func(t *txn) error { return s.deleteNode(t, name, force) })
}

// shutOut checks that a node may be deleted, and marks it as deleted. before is whether it was marked already.
func (t *txn) shutOut(name string, force bool) (node *pilasterv1.Node, before bool, err error) {
	node = new(pilasterv1.Node)
	if found, err := t.load(dirNodes+name, node); err != nil {
		return nil, false, err
	} else if !found {
		return nil, false, refuse(NotFound, "there is no node %q; `pilaster node list` lists the nodes", name)
	}
	if err := t.unsetEdge(name, force); err != nil {
		return nil, false, err
	}
	was, err := t.get(dirDeleted + node.Uuid)
	if err != nil {
		return nil, false, err
	}
	t.put(dirDeleted+node.Uuid, name)
	// What depends on the node comes first: an agent that is stopped forwards no more for a while.
	if err := cmp.Or(t.deletePublished(name, force), t.leaveGateways(name, force)); err != nil {
		return nil, false, err
	}
	if session, err := t.get(dirSessions + name); err != nil {
		return nil, false, err
	} else if session != "" && !force {
		return nil, false, refuse(Refused, "node %s is connected and was not deleted: stop its agent first, or use "+
			"--force if you cannot", name)
	}
	return node, was != "", t.leaveOffloads(name)
}

// deleteNode deletes a node that is shut out. It may take several transactions.
func (s *Store) deleteNode(t *txn, name string, force bool) error {
	node, before, err := t.shutOut(name, force)
	if err != nil {
		return err
	}
	hosted, err := t.hostedBy(name, before)
	if err != nil {
		return err
	}
	t.delete(dirSessions + name) // its orchestrator ends the stream when the record is deleted
	t.delete(dirUnreachable + name)
	for _, tenant := range hosted {
		if err := s.releaseAll(t, pki.Node{Name: name, UUID: node.Uuid}, tenant); err != nil {
			return err
		}
		if err := t.endHosting(tenant, name); err != nil {
			return err
		}
	}
	t.delete(dirUUIDs + node.Uuid)
	t.delete(dirNodes + name)
	return nil
}

var labelForm = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

// CheckNode refuses an invalid name or UUID of a node. A name is DNS labels joined by dots, at most 63 characters
// together, so that it fits the common name of a certificate. A UUID is in lower case.
func CheckNode(name, uuid string) error {
	if err := CheckNodeName(name); err != nil {
		return err
	}
	if !join.IsUUID(uuid) {
		return refuse(Invalid, "node UUID %.80q is not 32 lower-case hexadecimal digits in 5 groups", uuid)
	}
	return nil
}

// CheckNodeName refuses an invalid name of a node; see CheckNode.
func CheckNodeName(name string) error {
	ok := len(name) <= 63
	for label := range strings.SplitSeq(name, ".") {
		ok = ok && labelForm.MatchString(label)
	}
	if !ok {
		return refuse(
			Invalid,
			"node name %.80q is not a host name: use 1 to 63 of a-z, 0-9, - and ., each part starting and ending with "+
				"a letter or digit; choose one with --node-name",
			name,
		)
	}
	return nil
}
