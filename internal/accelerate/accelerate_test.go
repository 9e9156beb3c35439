package accelerate_test

import (
	"reflect"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/accelerate"
)

// arrangements are the overlays of other networks.
var arrangements = map[string]struct {
	make       func(*testing.T) [2]*node
	vni        uint32
	port       uint16
	containers []string
	vteps      [2]string
}{
	"flannel":           {flannel, 1, 8472, []string{"veth1"}, [2]string{"192.0.2.1", "192.0.2.2"}},
	"calico":            {calico, 4096, 4789, []string{"cali1"}, [2]string{"192.0.2.1", "192.0.2.2"}},
	"flannel over IPv6": {flannel6, 1, 8472, []string{"veth1"}, [2]string{"2001:db8::1", "2001:db8::2"}},
}

// The daemons find the overlay, connections use the cache in both directions on both nodes, and continue if the daemons
// are killed.
func TestOverlays(t *testing.T) {
	for name, a := range arrangements {
		t.Run(name, func(t *testing.T) {
			both := a.make(t)
			c := talk(t, both[0].only(), both[1].only())
			must(t, c.echo(10))
			daemons := []*daemon{both[0].accelerate(t), both[1].accelerate(t)}
			must(t, c.echo(500))
			for i, d := range daemons {
				s := d.until(t, "hits", func(s accelerate.Status) bool {
					return s.Egress.Hits > 400 && s.Ingress.Hits > 400
				})
				want := accelerate.OverlayStatus{
					Device: both[i].overlay, VNI: a.vni, Port: a.port, Local: a.vteps[i], VTEPs: []string{a.vteps[1-i]},
				}
				if !reflect.DeepEqual(s.Overlay, want) {
					t.Errorf("got overlay %+v, want %+v", s.Overlay, want)
				}
				if !slices.Equal(s.Containers.Devices, a.containers) || len(s.Problems) > 0 || !s.InUse {
					t.Errorf("got status %+v", s)
				}
			}
			daemons[0].end(unix.SIGKILL)
			must(t, c.echo(100))
			daemons[1].end(unix.SIGKILL)
			must(t, c.echo(100))
		})
	}
}
