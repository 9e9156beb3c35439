// Package openflow implements the part of OpenFlow 1.4 that filling the tables of an Open vSwitch bridge needs: hello,
// flows with OXM and NXM fields, bundles, barriers, reading flows back, and error texts. It does not know the purpose
// of the flows. Numbers are those of the OpenFlow Switch Specification 1.4.0 (§7, annex A) and of Open vSwitch's
// nicira-ext.h.
package openflow
