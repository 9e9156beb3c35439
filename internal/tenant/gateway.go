package tenant

import (
	"fmt"
	"net/netip"

	"pilaster.io/pilaster/internal/address"
)

// Guest is the alias of a peer outside of the tenant, at which the tenant's containers see it.
type Guest struct {
	Plaintext netip.Addr
	Address   netip.Addr // what containers see; for a clear tenant the plaintext
}

// Gateway returns the address at which containers with this tenant id see a node. Those of a clear tenant see its own
// address. Those of an encrypted tenant see the ciphertext of the first usable index of a reserved app. It is computed
// from node, plan and key, so nodes need no table of aliases (alias.h in bpf).
func (t Tenant) Gateway(plan address.Plan, node netip.Prefix, id ID) (Guest, error) {
	if t.Addressing == Clear {
		return Guest{NodeAddress(node), NodeAddress(node)}, nil
	}
	plain := address.Plain{Node: node, Tenant: id.ID, App: address.GatewayApp, Index: 1}
	found, seen, err := address.NewCipher(id.Key).Draw(plan.Private, plain)
	if err != nil {
		return Guest{}, fmt.Errorf("tenant %s id %d: the node has no address in it: %w", t.Name, id.ID, err)
	}
	return Guest{found.Addr(), seen}, nil
}
