package store

import (
	"context"
	"crypto/sha256"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	clientv3 "go.etcd.io/etcd/client/v3"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/pki"
	"pilaster.io/pilaster/internal/tenant"
)

// An address key has one address of its tenant. A container that is created with the key gets this address, on any
// node. If a container of another node has it, the address moves in two calls: the first returns the address and the
// next sequence, so that the node can prepare its device; the second, with that sequence, changes the mapping. From
// then on, calls of the former node about its container change nothing.
//
// While no container has the address, it is in quarantine, and the record of the key expires with it.

// Endpoint is the endpoint that addresses are for; zero for a node's subnets.
type Endpoint struct {
	Key string
	App uint32 // 0 unless mappings contain the apps
	// only with an address key
	AddressKey string
	Sequence   uint64
}

// Allocation is what AllocateFor returns.
type Allocation struct {
	Prefixes []netip.Prefix
	// only with an address key
	Sequence   uint64
	Elsewhere  bool
	FormerNode string
}

// AllocateFor is Allocate for an endpoint that may have an address key.
func (s *Store) AllocateFor(ctx context.Context, n pki.Node, name string, of Endpoint) (is Allocation, err error) {
	if err := checkAllocation(name, of.Key); err != nil {
		return is, err
	}
	if err := checkAddressKey(of); err != nil {
		return is, err
	}
	from := hints{}
	err = s.change(ctx, func(t *txn) (err error) {
		is, err = s.allocate(t, n, name, of, from)
		return err
	})
	return is, err
}

// keyedAddress is the record of an address key.
type keyedAddress struct {
	to       netip.Prefix
	sequence uint64 // of the last mapping; only increases
}

func (k keyedAddress) String() string {
	return k.to.String() + " " + strconv.FormatUint(k.sequence, 10)
}

func parseKeyedAddress(text string) (k keyedAddress, err error) {
	to, sequence, _ := strings.Cut(text, " ")
	if k.to, err = netip.ParsePrefix(to); err == nil {
		k.sequence, err = strconv.ParseUint(sequence, 10, 64)
	}
	if err != nil {
		return k, fmt.Errorf("the store's record %.80q of an address key is not readable: %w", text, err)
	}
	return k, nil
}

func addressKeyKey(tenant, addressKey string) string {
	return dirAddressKeys + tenant + "/" + fmt.Sprintf("%x", sha256.Sum256([]byte(addressKey)))
}

func checkAddressKey(of Endpoint) error {
	if err := tenant.CheckAddressKey(of.AddressKey); err != nil {
		return refuse(Invalid, "%v", err)
	}
	if of.AddressKey == "" && of.Sequence != 0 {
		return refuse(Invalid, "sequence %d without an address key; nothing was changed", of.Sequence)
	}
	return nil
}

// keyed returns the record of an address key and the mapping of its address; zero if there are none. A record whose
// address has another owner, as after a restore, counts as none.
func (t *txn) keyed(name, addressKey string) (k keyedAddress, is *pilasterv1.Mapping, err error) {
	is = new(pilasterv1.Mapping)
	text, err := t.get(addressKeyKey(name, addressKey))
	if err != nil || text == "" {
		return k, is, err
	}
	if k, err = parseKeyedAddress(text); err != nil {
		return k, is, err
	}
	if exists, err := t.load(mappingKey(name, k.to), is); err != nil || !exists || is.AddressKey == addressKey {
		return k, is, err
	}
	return keyedAddress{}, new(pilasterv1.Mapping), nil
}

// completeKeyed returns the address of an address key. It allocates the address if no container has it, and moves it if
// the request has the next sequence.
func (s *Store) completeKeyed(
	t *txn,
	n pki.Node,
	record *pilasterv1.Node,
	name string,
	of Endpoint,
	o tenant.Overlay,
	from hints,
) (Allocation, error) {
	k, is, err := t.keyed(name, of.AddressKey)
	if err != nil {
		return Allocation{}, err
	}
	all := []netip.Prefix{k.to}
	switch {
	case is.Name == n.Name && is.Key == of.Key:
		return Allocation{Prefixes: all, Sequence: is.Sequence}, t.setApp(name, of, all)
	case is.Name == n.Name:
		return Allocation{}, refuse(
			Exists,
			"address key %q of tenant %s is in use by container %s of this node; nothing was changed: remove that "+
				"container first, or use another key",
			of.AddressKey,
			name,
			is.Key,
		)
	case is.Name != "" && of.Sequence == 0:
		return Allocation{Prefixes: all, Sequence: is.Sequence + 1, Elsewhere: true}, nil
	case is.Name != "" && of.Sequence <= is.Sequence:
		return Allocation{}, refuse(
			Refused,
			"the address of key %q of tenant %s has moved to node %s meanwhile; nothing was changed: remove this "+
				"container",
			of.AddressKey,
			name,
			is.Name,
		)
	case is.Name != "":
		t.delete(allocationKey(name, is.Name, is.Key))
		return Allocation{Prefixes: all, Sequence: of.Sequence, FormerNode: is.Node},
			t.recordAllocation(record, name, of, all, all)
	}
	var previous []netip.Prefix
	if k.to.IsValid() {
		previous = all
	}
	to, err := t.allocatePrefix(name, o, previous, from)
	if err != nil {
		return Allocation{}, err
	}
	of.Sequence = k.sequence + 1
	all = []netip.Prefix{to}
	return Allocation{Prefixes: all, Sequence: of.Sequence}, t.recordAllocation(record, name, of, all, all)
}

// reserveKeyed keeps a released address for its address key as long as it is in quarantine.
func (s *Store) reserveKeyed(t *txn, name string, to netip.Prefix) error {
	if !to.IsSingleIP() {
		return nil
	}
	is := new(pilasterv1.Mapping)
	if exists, err := t.load(mappingKey(name, to), is); err != nil || !exists || is.AddressKey == "" {
		return err
	}
	if k, _, err := t.keyed(name, is.AddressKey); err != nil || k.to != to {
		return err
	}
	key := addressKeyKey(name, is.AddressKey)
	lease, err := s.currentQuarantine(t)
	if err != nil {
		return err
	}
	t.write(key, clientv3.OpPut(key, keyedAddress{to, is.Sequence}.String(), clientv3.WithLease(lease)))
	return nil
}

// claimKey returns the endpoint of a reported mapping that the store has lost. It keeps the key unless the key has
// another address by now.
func (t *txn) claimKey(held *pilasterv1.Mapping, to netip.Prefix) (Endpoint, error) {
	of := Endpoint{Key: held.Key, App: held.App}
	if held.AddressKey == "" {
		return of, nil
	}
	k, is, err := t.keyed(held.Tenant, held.AddressKey)
	if err == nil && (is.Name == "" || k.to == to) {
		of.AddressKey, of.Sequence = held.AddressKey, max(held.Sequence, k.sequence)
	}
	return of, err
}

// reclaimKeyed decides about an address that a node reports and that is another node's with the same address key. The
// report is from before a move, unless the store has been restored from a backup that is older than the move.
func (t *txn) reclaimKeyed(node *pilasterv1.Node, held, is *pilasterv1.Mapping, to netip.Prefix) error {
	if held.Sequence <= is.Sequence {
		return nil
	}
	t.delete(allocationKey(held.Tenant, is.Name, is.Key))
	of, all := Endpoint{held.Key, held.App, held.AddressKey, held.Sequence}, []netip.Prefix{to}
	return t.recordAllocation(node, held.Tenant, of, all, all)
}
