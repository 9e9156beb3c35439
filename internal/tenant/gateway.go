package tenant

import (
	"fmt"
	"net/netip"

	"pilaster.io/pilaster/internal/address"
)

// Guest is the alias address of a foreign peer among a tenant's containers.
type Guest struct {
	Plaintext netip.Addr
	Address   netip.Addr // what containers see; the plaintext where the tenant is clear
}

// Gateway returns the address by which containers of one of the tenant's ids see the node: the first usable index of
// the reserved app. It follows from node, plan and key.
func (t Tenant) Gateway(plan address.Plan, node netip.Prefix, id ID) (Guest, error) {
	plain := address.Plain{Node: node, Tenant: id.ID, App: address.GatewayApp, Index: 1}
	if t.Addressing == Clear {
		return Guest{plain.Addr(), plain.Addr()}, nil
	}
	found, seen, err := address.NewCipher(id.Key).Draw(plan.Private, plain)
	if err != nil {
		return Guest{}, fmt.Errorf("tenant %s id %d: the node has no address in it: %w", t.Name, id.ID, err)
	}
	return Guest{found.Addr(), seen}, nil
}
