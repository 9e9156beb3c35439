package nimitz

import (
	"encoding/binary"
	"net/netip"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/endpoint"
)

// Addresses of a gateway derive from numbers that are stored anyway, so they need neither allocation nor storage: a
// container's virtual address from its endpoint ID, whose quarantine covers the address too, and a publication's from
// its address on the underlay. In a block of 48 bits:
//
//	0 … 0 | 1           the gateway's own
//	1 | endpoint id     a container here
//	2 | index           a container elsewhere, published at that index
const (
	kinds     = 5 // bytes before the end
	container = 1
	published = 2
)

func inBlock(block netip.Prefix, kind byte, number uint32) netip.Addr {
	b := block.Masked().Addr().As16()
	b[len(b)-kinds] = kind
	binary.BigEndian.PutUint32(b[len(b)-4:], number)
	return netip.AddrFrom16(b)
}

// GatewayAddress returns the virtual address of the gateway itself, which containers see as the source of clients.
func GatewayAddress(block netip.Prefix) netip.Addr { return inBlock(block, 0, 1) }

// ContainerAddress returns the virtual address of a container on this node.
func ContainerAddress(block netip.Prefix, id endpoint.ID) netip.Addr {
	return inBlock(block, container, uint32(id))
}

// PublishedAddress returns the virtual address of a container elsewhere which is published at an index of
// tenant.UnderlayAddress.
func PublishedAddress(block netip.Prefix, i address.Index) netip.Addr {
	return inBlock(block, published, uint32(i))
}
