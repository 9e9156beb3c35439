// Package openflow speaks as much of OpenFlow 1.4 to a bridge of Open vSwitch as filling its tables takes: hello, flows
// with OXM and NXM fields, bundles, barriers, reading flows back, and errors in words. It knows nothing of what the
// flows are for. Numbers are those of the OpenFlow Switch Specification 1.4.0 (§7, annex A) and of Open vSwitch's
// nicira-ext.h.
package openflow
