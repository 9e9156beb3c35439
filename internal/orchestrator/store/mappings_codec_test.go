package store

import (
	"bytes"
	"encoding/json"
	"testing"

	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// TestMappingValues: a value of an older build is read, a mapping without new fields is written as older builds write
// it, and all fields come back.
func TestMappingValues(t *testing.T) {
	const at = dirMappings + "blue/0a000005/32"
	old := &pilasterv1.Mapping{Node: "fd70:696c:6100:1::/64", Name: "n1", Key: "c/eth0"}
	full := proto.CloneOf(old)
	full.NextHops, full.Locator = []string{"192.0.2.1", "2001:db8::1"}, "fd70:696c:6200:1::/64"
	full.Mac, full.App, full.Sequence, full.Origin = "0a:01:02:03:04:05", 9, 1<<40, "192.0.2.254"
	const written = `{"node":"fd70:696c:6100:1::/64","name":"n1","key":"c/eth0"}`
	for value, want := range map[string]*pilasterv1.Mapping{
		written: old,
		written[:len(written)-1] + `,"nextHops":["192.0.2.1","2001:db8::1"],"locator":"fd70:696c:6200:1::/64",` +
			`"mac":"0a:01:02:03:04:05","app":9,"sequence":"1099511627776","origin":"192.0.2.254"}`: full,
	} {
		want := proto.CloneOf(want)
		want.Tenant, want.To = "blue", "10.0.0.5/32"
		if got, err := decodeMapping(at, []byte(value)); err != nil || !proto.Equal(got, want) {
			t.Errorf("%s was read as %v, %v; want %v", value, got, err, want)
		}
	}
	for _, m := range []*pilasterv1.Mapping{old, full} {
		t.Run(m.Origin, func(t *testing.T) {
			changes := &txn{index: map[string]int{}}
			if err := changes.save(at, m); err != nil {
				t.Fatal(err)
			}
			value := changes.writes[0].ValueBytes()
			if m == old && compact(t, value) != written {
				t.Errorf("written as %s, by older builds as %s", value, written)
			}
			want := proto.CloneOf(m)
			want.Tenant, want.To = "blue", "10.0.0.5/32"
			if got, err := decodeMapping(at, value); err != nil || !proto.Equal(got, want) {
				t.Errorf("%s was read as %v, %v; want %v", value, got, err, want)
			}
		})
	}
}

// compact removes the spaces that protojson writes at random.
func compact(t *testing.T, value []byte) string {
	t.Helper()
	var b bytes.Buffer
	if err := json.Compact(&b, value); err != nil {
		t.Fatal(err)
	}
	return b.String()
}
