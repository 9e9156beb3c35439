package servicemap

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"github.com/cilium/ebpf"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/datapath/host"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/tenant"
)

// Clients are the endpoints of a node whose sockets get a backend when they connect to a service. The program finds
// them by the cookie of their namespace. Without that entry the packets of an endpoint to services are translated.
type Clients struct {
	host    *host.Host
	cookies sync.Map // by endpoint
}

// NewClients returns the table of a node. Nothing is read before the maps are loaded.
func NewClients(h *host.Host) *Clients { return &Clients{host: h} }

func (c *Clients) table() *ebpf.Map { return c.host.Objects.PilSvcnetnsV1 }

// Put writes the entry of an endpoint of a tenant id, whose namespace has the cookie.
func (c *Clients) Put(id endpoint.ID, of address.TenantID, seen netip.Addr, cookie uint64) error {
	t, _, err := bpfobj.Lookup[bpfobj.PilasterTenant](c.host.Objects.PilTenantsV2, uint32(of))
	if err != nil {
		return err
	}
	c.cookies.Store(id, cookie)
	return c.table().Put(cookie, bpfobj.PilasterSvcNetns{
		Address: bpfobj.ToAddr(seen), Services: t.Services, Endpoint: uint32(id),
	})
}

// Delete removes the entry of an endpoint. The entry of a namespace with two endpoints is the one of the endpoint that
// was put last, and stays until that one is deleted.
func (c *Clients) Delete(id endpoint.ID) error {
	cookie, known := c.cookies.LoadAndDelete(id)
	if !known {
		return nil
	}
	v, found, err := bpfobj.Lookup[bpfobj.PilasterSvcNetns](c.table(), cookie)
	if err == nil && found && v.Endpoint == uint32(id) {
		err = bpfobj.Delete(c.table(), cookie)
	}
	if err != nil {
		return fmt.Errorf("endpoint %d: remove it as a client of services: %w", id, err)
	}
	return nil
}

// SetTenant gives the endpoints of a tenant the number of its services.
func (c *Clients) SetTenant(t tenant.Tenant) error {
	var failed error
	err := bpfobj.ForEachEntry(c.table(), func(cookie uint64, v bpfobj.PilasterSvcNetns) {
		source, found, err := bpfobj.Lookup[bpfobj.PilasterEpSrc](c.host.Objects.PilSourcesV2, v.Address)
		if err != nil || !found || t.Of(address.TenantID(source.TenantId)).ID == 0 || v.Services == t.ServicesNumber {
			return
		}
		v.Services = t.ServicesNumber
		err = c.table().Update(cookie, v, ebpf.UpdateExist)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) { // else it was deleted meanwhile
			failed = fmt.Errorf("endpoint %d: its tenant has its first service: %w", v.Endpoint, err)
		}
	})
	return errors.Join(err, failed)
}

// Keep removes the entries of all endpoints that are not listed.
func (c *Clients) Keep(found []endpoint.Record) error {
	keep := map[uint64]bool{}
	for _, r := range found {
		if cookie, known := c.cookies.Load(r.ID); known {
			keep[cookie.(uint64)] = true
		}
	}
	return bpfobj.DeleteOthers(c.table(), keep)
}
