// Package openflow implements the part of OpenFlow 1.4 with which a client fills the tables of an Open vSwitch bridge:
// hello, flows with OXM and NXM fields, bundles, barriers, reading flows, and error texts. It does not depend on the
// purpose of the flows. Numbers are from the OpenFlow Switch Specification 1.4.0 (§7, annex A) and from Open vSwitch's
// nicira-ext.h.
package openflow
