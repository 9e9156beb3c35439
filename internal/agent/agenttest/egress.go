package agenttest

import (
	"net/netip"
	"time"

	"pilaster.io/pilaster/internal/endpoint"
)

// Outside is the part of a fake data path by which containers reach hosts outside of the cluster.
type Outside struct {
	Own      []netip.Addr               // addresses of the node
	Probed   map[netip.Prefix]time.Time // gateways; each answers at once, unless it is in Silent
	Silent   map[netip.Prefix]bool
	Answered map[netip.Prefix]time.Time
	Dead     map[netip.Prefix]bool
}

func newOutside() Outside {
	return Outside{
		Probed: map[netip.Prefix]time.Time{}, Silent: map[netip.Prefix]bool{}, Answered: map[netip.Prefix]time.Time{},
		Dead: map[netip.Prefix]bool{},
	}
}

func (d *Driver) SetOwnAddresses(own []netip.Addr) error {
	if err := d.call("SetOwnAddresses", endpoint.Record{}); err != nil {
		return err
	}
	d.Mu.Lock()
	defer d.Mu.Unlock()
	d.Outside.Own = own
	return nil
}

func (d *Driver) ProbeGateway(node netip.Prefix) error {
	d.Mu.Lock()
	defer d.Mu.Unlock()
	d.Outside.Probed[node] = time.Now()
	if !d.Outside.Silent[node] {
		d.Outside.Answered[node] = time.Now()
	}
	return d.Fail["ProbeGateway"]
}

func (d *Driver) GatewayAnswered(node netip.Prefix) (time.Duration, bool, error) {
	d.Mu.Lock()
	defer d.Mu.Unlock()
	at, ok := d.Outside.Answered[node]
	return time.Since(at), ok, nil
}

func (d *Driver) SetGatewayAlive(node netip.Prefix, alive bool) error {
	d.Mu.Lock()
	defer d.Mu.Unlock()
	d.Outside.Dead[node] = !alive
	return d.Fail["SetGatewayAlive"]
}
