package api

import (
	"testing"

	"pilaster.io/pilaster/internal/endpoint"
)

// An endpoint with a macvlan has no device on the node; its internal number is not shown as an ifindex.
func TestEndpointHasAnIfindexOfADeviceOnly(t *testing.T) {
	for host, want := range map[string]uint32{"pil3": 7, "": 0} {
		e := endpointToProto(nil, endpoint.Record{Device: endpoint.Device{HostName: host, HostIfindex: 7}})
		if e.HostIfindex != want || e.HostDevice != host {
			t.Errorf("device %q: %q, index %d, want %d", host, e.HostDevice, e.HostIfindex, want)
		}
	}
}
